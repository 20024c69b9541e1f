"""Layers of hybrid models with random weights, compared with the machine's limits.

python benchmarks/state_layers.py --shapes qwen3-next qwen3.5-moe

Four layers, three of them gated delta nets, with the shapes of the published models and a small vocabulary. Decode, one
sequence: bytes that a token needs (weights of its experts and of all other matrices, and states, read and written) per
second, as a share of the measured memory read bandwidth. Prefill: time of the prompt, as a share of the larger of two
lower bounds: reading the weights of all experts that its tokens use, and its multiply-adds at the measured rate. The
last column is the share of a nearer bound: experts and other matrices wait for each other's results, so that the sum
of the larger bounds of both is the limit. Results are medians.

``--transformers`` also runs transformers with the same shapes, threads and prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock import LLM, SamplingParams, demo
from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.state_spec import bytes_per_slot
from penstock.core.quantization import SCHEMES
from penstock.ops import cpu
from penstock.planning.kv_size import bytes_per_weight
from penstock.planning.model_size import model_size_of

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3.5-moe": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
"""Fields of ``config.json``; others have the defaults of transformers' classes, which are those of the models."""
KINDS = ["linear_attention"] * 3 + ["full_attention"]
COMMON = {"hidden_size": 2048, "num_hidden_layers": 4, "layer_types": KINDS, "vocab_size": 1024, "dtype": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, help="default: all")
    parser.add_argument("--quantization", default="none", choices=SCHEMES, help="format of the weights (default: none)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096], help="lengths of prompts")
    parser.add_argument("--transformers", action="store_true", help="also run transformers, in bfloat16")
    args = parser.parse_args()
    print("| shape | format | measured | share of the limit | of the sum |\n|---|---|---|---:|---:|")
    for name in args.shapes:
        measure(name, args.quantization, args.rounds, args.tokens)
        if args.transformers:
            measure_transformers(name, args.rounds, args.tokens)


def measure(name: str, quantization: str, rounds: int, lengths: list[int]) -> None:
    """Measure a shape; prints rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name] | COMMON | {"eos_token_id": None}))
        size = model_size_of(read_config_json(Path(folder)))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / file).write_bytes((demo.CHAT / file).read_bytes())
        llm = LLM(
            folder,
            load_format="dummy",
            quantization=quantization,
            max_model_len=max(lengths) + 256,
            max_num_seqs=4,
            max_num_batched_tokens=max(lengths),
            num_gpu_blocks_override=200,
            enable_prefix_caching=False,
            weight_cache_dir="none",
        )
    shape = SHAPES[name]
    weight = bytes_per_weight(size, quantization, "bfloat16")[0]
    experts = size.expert_weights * shape["num_experts"]
    dense = size.layer_weights - experts
    active = dense + size.expert_weights * shape["num_experts_per_tok"]
    states = 2 * bytes_per_slot(size.states)
    limits = [cpu.measure_limits() for _ in range(rounds)]
    read, rate = (
        statistics.median(values) for values in zip(*((one.read, one.bfloat16) for one in limits), strict=True)
    )

    def generate(prompt: list[int], outputs: int) -> None:
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True), use_tqdm=False)

    decode = median_decode(generate, rounds)
    needed = active * weight + states
    print(f"| {name} | {quantization} | decode: {1e3 * decode:.2f} ms, {needed / decode / 1e9:.1f} GB/s | "
          f"{needed / decode / read:.2f} of {read / 1e9:.1f} GB/s | |", flush=True)  # fmt: skip
    for length in lengths:
        seconds = median_prefill(generate, length, rounds)
        used = 1 - (1 - shape["num_experts_per_tok"] / shape["num_experts"]) ** length
        reads = [dense * weight / read, used * experts * weight / read]
        sums = [2 * dense * length / rate, 2 * (active - dense) * length / rate]
        bound = max(sum(reads), sum(sums))
        total = sum(max(pair) for pair in zip(reads, sums, strict=True))
        print(f"| {name} | {quantization} | prefill of {length}: {seconds:.2f} s, {length / seconds:.0f} tokens/s | "
              f"{bound / seconds:.2f} of {bound:.2f} s | {total / seconds:.2f} of {total:.2f} s |",
              flush=True)  # fmt: skip


@torch.inference_mode()
def measure_transformers(name: str, rounds: int, lengths: list[int]) -> None:
    """Measure transformers with a shape; prints rows of the table."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = SHAPES[name] | COMMON
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.uniform_(-0.02, 0.02)

    def generate(prompt: list[int], outputs: int) -> None:
        ids = torch.tensor([prompt])
        model.generate(ids, max_new_tokens=outputs, min_new_tokens=outputs, do_sample=False, pad_token_id=0)

    decode = median_decode(generate, rounds)
    print(f"| {name} | transformers | decode: {1e3 * decode:.2f} ms | | |", flush=True)
    for length in lengths:
        seconds = median_prefill(generate, length, rounds)
        print(f"| {name} | transformers | prefill of {length}: {seconds:.2f} s, {length / seconds:.0f} tokens/s | | |",
              flush=True)  # fmt: skip


Generate = Callable[[list[int], int], None]
"""Generates a number of tokens after a prompt."""


def median_decode(generate: Generate, rounds: int) -> float:
    """Seconds per token of one sequence."""
    return statistics.median(run(generate, 8, 65) - run(generate, 8, 1) for _ in range(rounds)) / 64


def median_prefill(generate: Generate, length: int, rounds: int) -> float:
    """Seconds for a prompt."""
    return statistics.median(run(generate, length, 1) for _ in range(rounds))


def run(generate: Generate, length: int, outputs: int) -> float:
    """Seconds for one sequence."""
    begin = time.perf_counter()
    generate([2 + i * 7 % 1000 for i in range(length)], outputs)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
