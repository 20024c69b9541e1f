"""The quality that quantization costs, measured with the demo model on held-out text and questions.

python benchmarks/quantization_quality.py

For each format of weights and KV cache: the Kullback-Leibler divergence of its next-token distribution from that in
bfloat16, averaged over the tokens of held-out answers, the share of tokens with the same top token, and the share of
held-out questions that are answered right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from penstock import demo, ops
from penstock.core.quantization import SCHEMES
from penstock.models import Model, load_model
from penstock.ops import AttentionMetadata, Batch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "demo_model"))
import evaluate

BLOCK = 64
ON_CPUS = [name for name, scheme in SCHEMES.items() if not scheme.layers.floating]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", nargs="+", choices=ON_CPUS, default=ON_CPUS, help="(default: all)")
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=["auto", "int8"], default=["auto", "int8"])
    parser.add_argument("--texts", type=int, default=8, help="held-out answers a skill for the divergence (default: 8)")
    parser.add_argument("--questions", type=int, default=48, help="questions a skill; 0 asks none (default: 48)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    texts = list(answers(args.texts))
    expected = list(distributions("none", "auto", texts))
    found: dict[str, dict[str, float]] = {}
    for name, kept in product(args.quantization, args.kv_cache_dtype):
        own = divergence(expected, distributions(name, kept, texts))
        if args.questions:
            own["right"] = share_right(name, kept, args.questions)
        found[f"{name} {kept}"] = own
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{sum(own for _, own in texts)} tokens of answers, {args.questions} questions a skill\n")
    print(table(found))


def answers(count: int) -> Iterator[tuple[list[int], int]]:
    """Token ids of held-out conversations, and how many of the last make up the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.CHAT)
    for conversations in evaluate.held_out(count, 1).values():
        for conversation in conversations:
            prompt = evaluate.render(tokenizer, conversation, prompt_only=True)
            answer = evaluate.render(tokenizer, conversation).removesuffix("\n").removeprefix(prompt)
            own = tokenizer.encode(answer)
            yield tokenizer.encode(prompt) + own, len(own)


def distributions(name: str, kept: str, texts: list[tuple[list[int], int]]) -> Iterator[Tensor]:
    """Log probabilities of each answer's tokens, ``[tokens, vocabulary]`` float32."""
    backend = ops.backend(torch.device("cpu"))
    model = load_model(demo.CHAT, backend, quantization=name)
    longest = max(len(ids) for ids, _ in texts)
    cache = backend.new_kv_cache(model.kv_specs(BLOCK, kept == "int8"), -(-longest // BLOCK), torch.device("cpu"))
    for ids, own in tqdm(texts, desc=f"{name} {kept}", unit="text", leave=False):
        yield log_probabilities(model, cache, ids, own)


def log_probabilities(model: Model, cache: list[Any], ids: list[int], own: int) -> Tensor:
    def queries(count: int, length: int) -> AttentionMetadata:
        starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, count], [length]))
        return AttentionMetadata(starts, lengths, torch.arange(-(-len(ids) // BLOCK), dtype=torch.int32)[None])

    batch = Batch(
        token_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        slot_mapping=torch.arange(len(ids)),
        attention=queries(len(ids), len(ids)),
        logits_indices=torch.arange(len(ids) - own - 1, len(ids) - 1),
        logits_attention=queries(own, len(ids) - 1),
    )
    return model.logits(model.forward(batch, cache)).log_softmax(-1)


def divergence(expected: list[Tensor], found: Iterator[Tensor]) -> dict[str, float]:
    total, agree, tokens = 0.0, 0, 0
    for before, after in zip(expected, found, strict=True):
        total += float((before.exp() * (before - after)).sum())
        agree += int((before.argmax(-1) == after.argmax(-1)).sum())
        tokens += len(before)
    return {"divergence": total / tokens, "same_top_token": agree / tokens}


def share_right(name: str, kept: str, count: int) -> float:
    """Of held-out questions, asked through ``LLM``."""
    drawn = [c for conversations in evaluate.held_out(count, 0).values() for c in conversations]
    asked = [c for c in drawn if c.check is not evaluate.Check.FREE]
    given = evaluate.Penstock(demo.CHAT, quantization=name, kv_cache_dtype=kept).ask(asked)
    return sum(map(evaluate.is_right, given, asked)) / len(asked)


def table(found: dict[str, dict[str, float]]) -> str:
    lines = [
        "| weights | KV cache | KL divergence, nats | same top token | right answers |",
        "|---|---|---:|---:|---:|",
    ]
    for key, one in found.items():
        name, kept = key.split()
        right = f"{one['right']:.1%}" if "right" in one else "–"
        lines.append(f"| `{name}` | `{kept}` | {one['divergence']:.4f} | {one['same_top_token']:.2%} | {right} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
