"""MoE layers with the shape of Qwen3-30B-A3B, compared with the machine's limits and with dense layers of the same
amount of work.

python benchmarks/experts.py --formats none w8a8 wint4-g32

Four layers of 128 experts, 8 per token, with random weights and routing. Decode, one token: bytes of active experts
per second, as a share of the measured memory read bandwidth. Prefill, 512 tokens: multiply-adds per second, as a share
of the rate of a dense MLP with the same work per token (the intermediate size of 8 experts). The dense MLP also
decodes, with the same number of bytes in contiguous matrices. All measurements alternate; results are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.core.quantization import SCHEMES, Format
from penstock.ops import Routing, cpu

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 2048, 768, 128, 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["none", "w8a8", "wint4-g32"], help="names of SCHEMES")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds (default: 7)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a prefill (default: 512)")
    parser.add_argument("--threads", type=int, default=0, help="number of threads (default: 0, all usable cores)")
    args = parser.parse_args()
    cpu.set_threads(args.threads)
    print("| format | decode, GB/s | share of read | dense decode, share | prefill, GFLOP/s | share of dense |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in args.formats:
        print(measure(name, args.rounds, args.tokens), flush=True)


def measure(name: str, rounds: int, tokens: int) -> str:
    """Measure a format; returns a row of the table."""
    format = SCHEMES[name].layers
    layers = [Layer(format) for _ in range(LAYERS)]
    dense = [Dense(format) for _ in range(LAYERS)]
    few, many = (torch.randn(count, HIDDEN).bfloat16() for count in (1, tokens))
    reads, decodes, dense_decodes, prefills, dense_prefills = ([] for _ in range(5))  # type: ignore[var-annotated]
    for _ in range(rounds):
        reads.append(cpu.measure_limits().read)
        decodes.append(seconds(lambda: [layer(few) for _ in range(8) for layer in layers]) / 8)
        dense_decodes.append(seconds(lambda: [layer(few) for _ in range(8) for layer in dense]) / 8)
        prefills.append(seconds(lambda: [layer(many) for layer in layers]))
        dense_prefills.append(seconds(lambda: [layer(many) for layer in dense]))
    read, decode, dense_decode, prefill, dense_prefill = map(
        statistics.median, (reads, decodes, dense_decodes, prefills, dense_prefills)
    )
    size = layers[0].expert_bytes * TOP_K * LAYERS
    work = 6 * HIDDEN * INTERMEDIATE * TOP_K * LAYERS * tokens
    return (
        f"| {name} | {size / decode / 1e9:.1f} | {size / decode / read:.2f} | {size / dense_decode / read:.2f} "
        f"| {work / prefill / 1e9:.0f} | {dense_prefill / prefill:.2f} |"
    )


class Layer:
    """MoE layer with random router logits."""

    def __init__(self, format: Format) -> None:
        gate_up = [packed(2 * INTERMEDIATE, HIDDEN, format) for _ in range(EXPERTS)]
        down = [packed(HIDDEN, INTERMEDIATE, format) for _ in range(EXPERTS)]
        self.expert_bytes = sum(
            tensor.nbytes for matrix in (gate_up[0], down[0]) for tensor in cpu.packed_tensors(matrix).values()
        )
        self._gate_up, self._down = cpu.stack_experts(gate_up), cpu.stack_experts(down)

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = cpu.select_experts(torch.randn(len(x), EXPERTS), Routing(TOP_K, renormalize=True))
        activations = cpu.experts_activation_and_mul(x, self._gate_up, ids, "silu")
        return cpu.combine_experts(cpu.experts_linear(activations, self._down, ids), weights)


class Dense:
    """Dense MLP with as many weights as the active experts of a token."""

    def __init__(self, format: Format) -> None:
        self._gate_up = packed(2 * INTERMEDIATE * TOP_K, HIDDEN, format)
        self._down = packed(HIDDEN, INTERMEDIATE * TOP_K, format)

    def __call__(self, x: Tensor) -> Tensor:
        return cpu.linear(cpu.linear_activation_and_mul(x, self._gate_up, "silu"), self._down)


def packed(outputs: int, inputs: int, format: Format) -> Any:
    return cpu.pack([torch.randn(outputs, inputs, dtype=torch.bfloat16) * inputs**-0.5], None, format)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
