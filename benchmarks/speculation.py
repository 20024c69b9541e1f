"""Speedup of speculative decoding: tokens per second with and without drafts, alternating.

python benchmarks/speculation.py [CHECKPOINT] [--speculative-config JSON ...]

Several methods alternate with the same prompts in one run. By default the built-in model answers questions and
continues repetitive lists, with its draft model and with n-gram lookup. Another checkpoint only continues the lists, as
a model with random weights cannot answer questions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

from tqdm import tqdm

from penstock import LLM, SamplingParams
from penstock.engine.spec_decode.speculation import SpecDecodingStats

QUESTIONS = [
    "What is the capital of Canada?",
    "Tell me a story.",
    "What is 17 + 25?",
    "Count from 1 to 20.",
    "Tell me about Anna, who lives in Paris.",
    "Translate good morning to French.",
    "Sort these numbers: 5, 3, 9, 1.",
    "What is the opposite of hot?",
]
LISTS = [" ".join([word] * 6 + ["one two three four five"] * 6) for word in "red blue green white black grey".split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="")
    parser.add_argument(
        "--speculative-config", nargs="+", help="JSON, one per method (default: all methods the model supports)"
    )
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    parser.add_argument("--output-len", type=int, default=96, help="tokens per sequence (default: 96)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    args = parser.parse_args()
    methods = args.speculative_config or [
        '{"method": "ngram"}',
        *([] if args.checkpoint else ['{"method": "draft_model"}']),
    ]
    common = {"model": args.checkpoint, "quantization": args.quantization, "max_model_len": 1024}
    plain = LLM(kv_cache_memory_bytes=2**28, **common)
    speculating = {
        (method, adaptive): LLM(
            kv_cache_memory_bytes=2**28, **common, speculative_config=json.loads(method) | {"adaptive": adaptive}
        )
        for method in methods
        for adaptive in (False, True)
    }
    for name, prompts in (("lists", LISTS),) if args.checkpoint else (("questions", QUESTIONS), ("lists", LISTS)):
        for batch in args.batch:
            measure(f"{name} x{batch}", plain, speculating, prompts, name, batch, args)


Engines = dict[tuple[str, bool], LLM]
"""Engines by ``speculative_config`` (JSON) and ``adaptive`` (stop drafting while it lowers the throughput)."""


def measure(
    title: str, plain: LLM, speculating: Engines, prompts: list[str], kind: str, batch: int, args: argparse.Namespace
) -> None:
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)

    def run(llm: LLM) -> float:
        """Generate for all prompts in batches; returns tokens per second."""
        tokens, seconds = 0, 0.0
        for start in range(0, len(prompts), batch):
            some = (prompts * batch)[start : start + batch]
            begun = time.perf_counter()
            if kind == "questions":
                outputs = llm.chat([[{"role": "user", "content": text}] for text in some], params, use_tqdm=False)
            else:
                outputs = llm.generate(some, params, use_tqdm=False)
            seconds += time.perf_counter() - begun
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens / seconds

    for llm in (plain, *speculating.values()):
        run(llm)  # warm up
    before = {key: replace(stats(llm)) for key, llm in speculating.items()}
    ratios: dict[tuple[str, bool], list[float]] = {key: [] for key in speculating}
    rates = []
    for _ in tqdm(range(args.rounds), desc=title, unit="round", leave=False):
        rates.append(run(plain))
        for key, llm in speculating.items():
            ratios[key].append(run(llm) / rates[-1])
    print(f"{title}: {statistics.median(rates):.0f} tokens/s without")
    for method in dict.fromkeys(method for method, _ in speculating):
        always, adaptive = (statistics.median(ratios[method, each]) for each in (False, True))
        drafts, drafted, accepted = (
            getattr(stats(speculating[method, False]), name) - getattr(before[method, False], name)
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        print(
            f"  {method}: speedup {always:.2f}, adaptive {adaptive:.2f}; {accepted / max(drafted, 1):.0%} of draft "
            f"tokens accepted, {1 + accepted / max(drafts, 1):.2f} tokens per step with drafts"
        )


def stats(llm: LLM) -> SpecDecodingStats:
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    return speculation.stats


if __name__ == "__main__":
    main()
