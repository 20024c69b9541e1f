"""Log probabilities as clients get them, of prompts and of what was generated, against transformers.

Computed with each instruction set that this machine has: this is what holds a whole server under each to its oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest
import torch
from serving import Served
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from penstock import demo

PROMPT = "Once upon a time, in 巴黎, there was"
STORY = [{"role": "user", "content": "Tell me a story."}]
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8, "seed": 3, "frequency_penalty": 1.0}
CHANGED = {"repetition_penalty": 1.3, "min_p": 0.01}
"""What is told is what the model says before any of this."""
try:
    from penstock.ops import native
except ImportError:  # the CPU kernels were not built
    SETS = [""]
else:
    SETS = ["", *native._kernels.available()]
"""Instruction sets; the empty one is the one that this machine takes."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.thorough if name else []) for name in SETS]
)
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    flags = ("--num-gpu-blocks-override", "400", "--dtype", "float32", "--max-num-batched-tokens", "8")
    environment = {"PENSTOCK_ISA": request.param} if request.param else {}
    with (
        Served(*flags, environment=environment) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo.CHAT, dtype=torch.float32)


@torch.inference_mode()
def table(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Of what follows each token, ``[tokens, vocabulary]``."""
    found: Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


def near(found: float, wanted: Tensor) -> None:
    assert found == pytest.approx(wanted.item(), abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 12])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_tells_of_prompt_and_output(
    client: openai.OpenAI, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, max_tokens: int, stream: bool
) -> None:
    asked = {"model": "default", "prompt": PROMPT, "max_tokens": max_tokens, "echo": True, "logprobs": 3, **SAMPLED}
    body = {**CHANGED, "return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(**asked, extra_body=body, stream=stream)  # type: ignore[call-overload]
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    made = [token for choice in choices for token in choice.token_ids]
    assert len(made) == max_tokens
    told = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for own in told for token in own.tokens]
    values = [value for own in told for value in own.token_logprobs]
    tops = [top for own in told for top in own.top_logprobs]
    ids = tokenizer.encode(PROMPT) + made
    rows = table(model, ids)
    assert len(tokens) == len(values) == len(tops) == len(ids)
    assert (values[0], tops[0]) == (None, None), "nothing predicts the first"
    for row, token_id, token, value, top in zip(rows, ids[1:], tokens[1:], values[1:], tops[1:], strict=False):
        near(value, row[token_id])
        near(top[token], row[token_id])
        best = row.topk(3)
        assert max(top.values()) == pytest.approx(best.values[0].item(), abs=1e-4)
        assert 1 <= len(top) <= 4, "three, the token itself, and fewer where several are parts of one character"
        assert all(value <= best.values[0] + 1e-4 for value in top.values())
    assert text.startswith(PROMPT)
    offsets = [offset for own in told for offset in own.text_offset]
    assert offsets == [0, *accumulate(map(len, tokens))][:-1]


def test_a_chats_tokens_come_with_their_alternatives(
    client: openai.OpenAI, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    asked = {"model": "default", "messages": STORY, "max_tokens": 12, "logprobs": True, "top_logprobs": 20, **SAMPLED}
    body = {**CHANGED, "return_token_ids": True, "prompt_logprobs": 2}
    answer = client.chat.completions.create(**asked, extra_body=body)  # type: ignore[call-overload]
    prompt, made = answer.prompt_token_ids, answer.choices[0].token_ids
    rows = table(model, prompt + made)
    for row, token_id, told in zip(rows[len(prompt) - 1 :], made, answer.choices[0].logprobs.content, strict=False):
        near(told.logprob, row[token_id])
        best = row.topk(20)
        assert [one.logprob for one in told.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert bytes(told.bytes) == bytes(told.top_logprobs[0].bytes) or told.logprob < told.top_logprobs[0].logprob
    assert answer.prompt_logprobs[0] is None
    for row, token_id, told in zip(rows, prompt[1:], answer.prompt_logprobs[1:], strict=False):
        own = told[str(token_id)]
        near(own["logprob"], row[token_id])
        assert (row > row[token_id] + 1e-4).sum() < own["rank"] <= (row > row[token_id] - 1e-4).sum()
        for other, found in told.items():
            near(found["logprob"], row[int(other)])
        assert {1, 2} <= {found["rank"] for found in told.values()}


@pytest.mark.row("fastdeploy", "temp_scaled_logprobs", "top_p_normalized_logprobs")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_log_probabilities_as_tokens_were_drawn(
    client: openai.OpenAI, model: PreTrainedModel, scaled: bool, within: bool
) -> None:
    """FastDeploy's: at the temperature, and among the tokens that top_p leaves."""
    asked = {"model": "default", "prompt": PROMPT, "max_tokens": 6, "temperature": 0.6, "top_p": 0.7, "seed": 5}
    modes = {"temp_scaled_logprobs": scaled, "top_p_normalized_logprobs": within}
    body = {"return_token_ids": True, "ignore_eos": True, **modes}
    (choice,) = client.completions.create(**asked, logprobs=5, extra_body=body).choices  # type: ignore[call-overload]
    assert len(choice.token_ids) == len(choice.logprobs.token_logprobs) == 6
    scores = table(model, choice.prompt_token_ids + choice.token_ids)[len(choice.prompt_token_ids) - 1 :]
    likely = (scores / (0.6 if scaled else 1)).softmax(-1)
    if within:
        order = likely.argsort(-1, descending=True)
        before = likely.gather(-1, order).cumsum(-1) - likely.gather(-1, order)
        likely = likely.scatter(-1, order, likely.gather(-1, order).masked_fill(before >= 0.7, 0))
        likely /= likely.sum(-1, keepdim=True)
    for told, token, row in zip(choice.logprobs.token_logprobs, choice.token_ids, likely, strict=False):
        if row[token] > 0:  # else it was drawn at the temperature, and is not among what is left without
            near(told, row[token].log())
        else:
            assert told == -9999
