"""Embeddings of an encoder compared with transformers, alternating: 64 texts of 128 tokens, the shape of MiniLM-L12,
random weights.

python benchmarks/encoders.py [--rounds 5]

The results are medians over all rounds. transformers needs no padding, as all texts have the same length. w8a8 is
compared with transformers in bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from penstock import LLM

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from encoder_checkpoints import save_tokenizer

TEXTS, TOKENS = 64, 128
FORMATS = {"float32": ("float32", "none"), "bfloat16": ("bfloat16", "none"), "w8a8": ("bfloat16", "w8a8")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(config).eval()
    token_ids = torch.randint(10, 30_000, (TEXTS, TOKENS))
    print("| format | Penstock, s | transformers, s | ratio |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        save_tokenizer(folder)
        for label, (dtype, quantization) in FORMATS.items():
            ours, theirs = measure(folder, model, token_ids, dtype, quantization, args.rounds)
            print(f"| {label} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.1f} |", flush=True)


def measure(
    folder: Path, model: BertModel, token_ids: torch.Tensor, dtype: str, quantization: str, rounds: int
) -> tuple[float, float]:
    """Median seconds in which Penstock and transformers embed all texts."""
    llm = LLM(folder, dtype=dtype, quantization=quantization)
    other = model.to(getattr(torch, dtype))
    prompts = [{"prompt_token_ids": row} for row in token_ids.tolist()]

    def ours() -> None:
        llm.embed(prompts, use_tqdm=False)

    @torch.inference_mode()
    def theirs() -> None:
        other(input_ids=token_ids, attention_mask=torch.ones_like(token_ids))

    for call in (ours, theirs):
        call()
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    here, there = zip(*times, strict=True)
    return statistics.median(here), statistics.median(there)


def seconds(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
