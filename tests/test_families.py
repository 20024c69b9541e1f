"""Every dense family against transformers, with configurations drawn at random: on switches and off."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, draw
from transformers import PreTrainedModel

from penstock.core import SamplingParams
from penstock.frontend.llm import LLM

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

DRAWS = int(os.environ.get("PENSTOCK_FAMILY_DRAWS", "20"))
"""Configurations of each family in the thorough test."""
TOLERANCE = 2e-5
PROMPTS = [[Random(length).randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 7, 40, 99, 170, 300)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
WITH_PROMPT = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_num_batched_tokens": 50,  # prompts are computed in chunks
    "max_model_len": 320,
    "num_gpu_blocks_override": 26,  # fewer than the prompts need together, so that some are preempted
    "weight_cache_dir": "none",
}


def check(folder: Path, model: PreTrainedModel) -> None:
    """In a batch and in chunks, with preemption, and again from the prefix cache: the library's tokens and, up to
    ``TOLERANCE``, its log probabilities. Where its own errors, against itself in float64, are not much smaller than that,
    thrice those."""
    llm = LLM(folder, **OPTIONS)
    first, again = (llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2))
    assert llm.engine.scheduler.num_preemptions > 0
    assert any(output.num_cached_tokens for output in again)
    whole = llm.generate(PROMPTS, WITH_PROMPT, use_tqdm=False)
    exact = deepcopy(model).double()
    error, own_error = 0.0, 0.0
    for prompt, output, repeated, with_prompt in zip(PROMPTS, first, again, whole, strict=True):
        (made,) = output.outputs
        assert repeated.outputs[0].token_ids == made.token_ids
        assert repeated.outputs[0].logprobs == made.logprobs
        with torch.inference_mode():
            given = torch.tensor([prompt + made.token_ids])
            library, table = (each(given).logits[0].log_softmax(-1) for each in (model, exact))
        assert library[len(prompt) - 1 : -1].argmax(-1).tolist() == made.token_ids
        told = [*(with_prompt.prompt_logprobs or [])[1:], *(made.logprobs or [])]
        assert len(told) == len(prompt) + len(made.token_ids) - 1
        for row, own, position in zip(table, library, told, strict=False):
            assert position
            for token_id, found in position.items():
                error = max(error, abs(found.logprob - own[token_id].item()))
                own_error = max(own_error, abs(own[token_id].item() - row[token_id].item()))
    assert error <= max(TOLERANCE, 3 * own_error)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_log_probabilities(family: str, tmp_path: Path) -> None:
    check(tmp_path, draw(family, 0, tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_other_configurations(family: str, tmp_path: Path) -> None:
    for seed in range(1, DRAWS + 1):
        check(tmp_path / str(seed), draw(family, seed, tmp_path / str(seed)))
