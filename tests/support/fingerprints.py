"""Fingerprint and results of an engine; as a program, for the checkpoint given as argument. Imports only the engine, so
that processes start quickly."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

from penstock import LLM, SamplingParams

OPTIONS = {"dtype": "bfloat16", "num_gpu_blocks_override": 60, "weight_cache_dir": "none"}


def results(llm: LLM) -> str:
    """Text with the tokens, log probabilities and logits of several requests."""
    rng = Random(0)
    prompts = [[rng.randrange(2, 300) for _ in range(length)] for length in (7, 150)]
    greedy = SamplingParams(temperature=0, max_tokens=10, logprobs=2, ignore_eos=True, return_generation_logits=True)
    sampled = SamplingParams(temperature=1, seed=3, max_tokens=10, ignore_eos=True)
    outputs = [*llm.generate(prompts, greedy, use_tqdm=False), *llm.generate(prompts, sampled, use_tqdm=False)]
    return repr([(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].generation_logits) for o in outputs])


def fingerprint_and_results(folder: Path, **options: Any) -> tuple[str, str]:
    llm = LLM(folder, **OPTIONS | options)
    return llm.engine.info.fingerprint, results(llm)


if __name__ == "__main__":
    print(*fingerprint_and_results(Path(sys.argv[1])), sep="\n")
