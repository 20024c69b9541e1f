"""What guessing ahead brings: tokens a second with and without, in turns.

python benchmarks/speculation.py [CHECKPOINT] [--speculative-config JSON ...]

Several methods are measured in turns, with the same questions, in one sitting. By default the model in the box answers
questions with its draft model and by what came before, and goes on with lists that repeat themselves. Another
checkpoint goes on with the lists only, as a model of random weights has nothing to say.
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
        "--speculative-config", nargs="+", help="as JSON (default: each method that the model in the box allows)"
    )
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences at a time (default: 1 8)")
    parser.add_argument("--output-len", type=int, default=96, help="tokens of each (default: 96)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    methods = args.speculative_config or [
        '{"method": "ngram"}',
        *([] if args.checkpoint else ['{"method": "draft_model"}']),
    ]
    common = {"model": args.checkpoint, "quantization": args.quantization, "max_model_len": 1024}
    plain = LLM(kv_cache_memory_bytes=2**28, **common)
    guessing = {
        (method, adaptive): LLM(
            kv_cache_memory_bytes=2**28, **common, speculative_config=json.loads(method) | {"adaptive": adaptive}
        )
        for method in methods
        for adaptive in (False, True)
    }
    for name, prompts in (("lists", LISTS),) if args.checkpoint else (("questions", QUESTIONS), ("lists", LISTS)):
        for batch in args.batch:
            measure(f"{name} x{batch}", plain, guessing, prompts, name, batch, args)


Guessing = dict[tuple[str, bool], LLM]
"""By the method's JSON, and whether it may stop where it does not pay."""


def measure(
    title: str, plain: LLM, guessing: Guessing, prompts: list[str], kind: str, batch: int, args: argparse.Namespace
) -> None:
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)

    def run(llm: LLM) -> float:
        """Tokens a second."""
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

    for llm in (plain, *guessing.values()):
        run(llm)  # what is made once, and what is tried
    before = {key: replace(stats(llm)) for key, llm in guessing.items()}
    ratios: dict[tuple[str, bool], list[float]] = {key: [] for key in guessing}
    rates = []
    for _ in tqdm(range(args.rounds), desc=title, unit="round", leave=False):
        rates.append(run(plain))
        for key, llm in guessing.items():
            ratios[key].append(run(llm) / rates[-1])
    print(f"{title}: {statistics.median(rates):.0f} tokens/s without")
    for method in dict.fromkeys(method for method, _ in guessing):
        always, adaptive = (statistics.median(ratios[method, each]) for each in (False, True))
        drafts, guessed, right = (
            getattr(stats(guessing[method, False]), name) - getattr(before[method, False], name)
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        print(
            f"  {method}: {always:.2f} times as many with guesses, {adaptive:.2f} where they may stop; "
            f"{right / max(guessed, 1):.0%} right, {1 + right / max(drafts, 1):.2f} tokens a step with guesses"
        )


def stats(llm: LLM) -> SpecDecodingStats:
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    return speculation.stats


if __name__ == "__main__":
    main()
