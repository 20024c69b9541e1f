"""Multi-head latent attention (MLA) in absorbed form, as in Penstock, compared with expanded form: KV cache bytes per
token, and time of a layer's attention, alternating.

python benchmarks/latent_attention.py [--heads 128] [--threads 2]

The expanded form stores each head's keys and values, as multi-head attention does; values are padded to the size of
keys. Both forms compute the same outputs from the same queries and latent vectors; projections that both forms need are
not measured. Ratios are similar on other machines, times are not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from penstock.ops import AttentionMetadata, AttentionOptions, KVSpec, cpu

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
"""Vector sizes of latent attention in DeepSeek-V2, V3 and R1, and Kimi-K2."""
BLOCK, CPU = 64, torch.device("cpu")
STEPS = (
    ("decode", 1, 1, 1024),
    ("decode", 1, 1, 4096),
    ("decode", 8, 1, 1024),
    ("prefill", 1, 512, 512),
    ("prefill", 1, 512, 4096),
)
"""Kind, number of sequences, new tokens per sequence, and total tokens per sequence."""


class Layer:
    """Both forms of a layer's attention, for ``sequences`` sequences of ``length`` tokens, the last ``new`` computed.

    Args:
        quantization: KV cache quantization, as in ``KVSpec``.
    """

    def __init__(self, heads: int, sequences: int, new: int, length: int, quantization: str) -> None:
        self.heads, self.rows, self.scale = heads, sequences * new, (NOPE + ROPE) ** -0.5
        blocks = -(-length // BLOCK)
        starts, lengths = torch.arange(0, self.rows + 1, new).int(), torch.full((sequences,), length).int()
        self.metadata = AttentionMetadata(starts, lengths, torch.arange(sequences * blocks).int().view(sequences, -1))
        self.specs = (
            KVSpec(1, LATENT + ROPE, "bfloat16", BLOCK, quantization, latent=LATENT),
            KVSpec(heads, NOPE + ROPE, "bfloat16", BLOCK, quantization),
        )
        (self.latent_cache,), (self.cache,) = (cpu.new_kv_cache([spec], sequences * blocks, CPU) for spec in self.specs)
        for cache in (self.latent_cache, self.cache):
            fill(cache.data)
        self.q, self.latent = randn(self.rows, heads, NOPE + ROPE), randn(self.rows, LATENT)
        self.keys, self.values = (
            cpu.pack_by_head(randn(heads, *shape) / 16) for shape in ((LATENT, NOPE), (VALUE, LATENT))
        )
        self.up = cpu.pack([randn(heads * (NOPE + VALUE), LATENT) / 16])

    def absorbed(self) -> Tensor:
        """Project queries to the latent space, attend to latent vectors, and project the result to values."""
        queries = torch.empty(self.rows, self.heads, LATENT + ROPE, dtype=torch.bfloat16)
        cpu.linear_by_head(self.q[..., :NOPE], self.keys, queries[..., :LATENT])
        queries[..., LATENT:] = self.q[..., NOPE:]
        attended = cpu.latent_attention(queries, self.latent_cache, self.metadata, self.scale, LATENT)
        return cpu.linear_by_head(attended, self.values)

    def expanded(self) -> Tensor:
        """Compute keys and values of the new tokens, and attend to the keys and values of all tokens."""
        cpu.linear(self.latent, self.up)
        return cpu.attention(self.q, self.cache, self.metadata, AttentionOptions(self.scale))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def fill(data: Tensor) -> None:
    """Fill a cache with values that are small in any of its dtypes."""
    data.view(torch.int16).copy_(torch.randn(data.numel() // 2).bfloat16().view(torch.int16).view(data.shape[0], -1))


def seconds(call: Callable[[], Tensor], minimum: float = 0.2) -> float:
    """Seconds per call, averaged over calls for at least ``minimum`` seconds."""
    begun, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - begun) < minimum or not calls:
        call()
        calls += 1
    return passed / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=128, help="attention heads; V3 has 128, V2-Lite 16 (default: 128)")
    parser.add_argument("--threads", type=int, default=0, help="number of threads (default: 0, all cores)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    args = parser.parse_args()
    cpu.set_threads(args.threads)
    print("| step | KV cache | bytes a token: absorbed | expanded | ratio | ms: absorbed | expanded | ratio |")
    print("|---" * 8 + "|")
    for kind, sequences, new, length in STEPS:
        for quantization in ("", "int8"):
            layer = Layer(args.heads, sequences, new, length, quantization)
            layer.absorbed(), layer.expanded()  # warm up
            rounds = tqdm(range(args.rounds), desc=f"{kind} {sequences} x {length}", leave=False)
            times = [(seconds(layer.absorbed), seconds(layer.expanded)) for _ in rounds]
            ratio = statistics.median(expanded / absorbed for absorbed, expanded in times)
            absorbed, expanded = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
            small, large = (spec.bytes_per_token for spec in layer.specs)
            print(
                f"| {kind}, {sequences} × {new} of {length} | {quantization or 'bfloat16'} | {small:,} | {large:,} "
                f"| {large / small:.0f} | {absorbed:.2f} | {expanded:.2f} | {ratio:.2f} |"
            )


if __name__ == "__main__":
    main()
