"""Decode speed of weight formats of quantized checkpoints, compared with Penstock's formats of the same group size.

python benchmarks/checkpoint_formats.py CHECKPOINT

Weights are random integers with random scales and offsets, as speed does not depend on them; only shapes and tokenizer
are read from the checkpoint. All formats alternate in one run; the results are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock import LLM, SamplingParams, models
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.models.weights import DummyWeights
from penstock.ops import QuantizedWeight

PROMPT = list(range(100, 116))


@dataclass(frozen=True)
class Case:
    """Format of a checkpoint, compared with a scheme of Penstock. Activation format and LM head are the scheme's."""

    name: str
    format: Format
    scheme: str


CASES = (
    Case("4 bits, groups of 128, zero points (AWQ, GPTQ)", Format(4, 128, asymmetric=True), "wint4"),
    Case("the same, 8-bit activations", Format(4, 128, asymmetric=True), "w4a8"),
    Case("4 bits, groups of 32 (Q4_0)", Format(4, 32), "wint4-g32"),
    Case("the same, 8-bit activations", Format(4, 32), "w4a8-g32"),
    Case("4 bits, groups of 32, offsets (Q4_1)", Format(4, 32, asymmetric=True), "wint4-g32"),
    Case("the same, 8-bit activations", Format(4, 32, asymmetric=True), "w4a8-g32"),
    Case("8 bits, groups of 32 (Q8_0)", Format(8, 32), "wint8"),
    Case("the same, 8-bit activations", Format(8, 32), "w8a8"),
)


class QuantizedDummyWeights(DummyWeights):
    """Random weights with layers quantized to ``format``."""

    format = UNQUANTIZED

    def format_of(self, name: str) -> Format:
        return self.format if ".layers." in name else UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        limit, groups = 1 << (self.format.bits - 1), -(-inputs // (self.format.group_size or inputs))
        values = torch.randint(-limit, limit, (outputs, inputs), generator=generator, dtype=torch.int8)
        scales = (torch.rand(outputs, groups, generator=generator) + 0.5) * inputs**-0.5 / limit
        scales = scales.half().float()  # checkpoints store float16 scales
        offsets = scales * torch.randint(-limit, limit, scales.shape, generator=generator)
        return QuantizedWeight(values, scales, self.format, offsets if self.format.asymmetric else None).rows(*rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--batch-size", type=int, default=1, help="number of sequences (default: 1)")
    parser.add_argument("--output-len", type=int, default=48, help="tokens to generate per sequence (default: 48)")
    parser.add_argument("--threads", type=int, default=2, help="number of threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="indices of CASES to measure")
    args = parser.parse_args()
    models.DummyWeights = QuantizedDummyWeights  # type: ignore[misc]

    def load(format: Format, scheme: str) -> LLM:
        QuantizedDummyWeights.format = format
        return LLM(
            args.checkpoint,
            load_format="dummy",
            dtype="bfloat16",
            quantization=scheme,
            threads=args.threads,
            max_model_len=128,
            num_gpu_blocks_override=2 * args.batch_size,
            enable_prefix_caching=False,
        )

    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)

    def rate(llm: LLM) -> float:
        """Decode speed in tokens per second and sequence."""
        prompts = [PROMPT] * args.batch_size
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate(prompts, one, use_tqdm=False)
        prefilled = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return (args.output_len - 1) / (time.perf_counter() - prefilled - (prefilled - begun))

    cases = [CASES[number] for number in args.cases]
    references = {scheme: load(UNQUANTIZED, scheme) for scheme in {case.scheme for case in cases}}
    loaded = [load(case.format, case.scheme) for case in cases]
    for llm in (*references.values(), *loaded):
        rate(llm)
    print(f"{loaded[0].engine.info.fingerprint}, batch {args.batch_size}, {args.threads} threads")
    found: list[list[tuple[float, float]]] = [[] for _ in cases]
    for _ in range(args.rounds):
        for case, llm, rounds in zip(cases, loaded, found, strict=True):
            rounds.append((rate(references[case.scheme]), rate(llm)))
    print(f"{'tokens per second, medians':48} {'Penstock format':>18} {'ratio':>6}")
    for case, rounds in zip(cases, found, strict=True):
        before, now = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(b / a for a, b in rounds)
        print(f"{case.name:48} {now:>7.1f} {case.scheme:>10} {before:.1f} {ratio:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
