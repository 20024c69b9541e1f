"""Logprobs of prompts and outputs over HTTP, compared with transformers.

``make thorough`` repeats the tests with a server for each instruction set of the machine.
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
"""Parameters that affect sampling but not the reported logprobs."""
try:
    from penstock.ops import native
except ImportError:  # the CPU kernels were not built
    SETS = [""]
else:
    SETS = ["", *native._kernels.available()]
"""Instruction sets; the empty name is this machine's default."""


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
    """Return the logprobs of the next token at each position, ``[tokens, vocabulary]``."""
    found: Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


def assert_close(found: float, expected: Tensor) -> None:
    assert found == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 12])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_returns_logprobs_of_prompt_and_output(
    client: openai.OpenAI, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, max_tokens: int, stream: bool
) -> None:
    request = {"model": "default", "prompt": PROMPT, "max_tokens": max_tokens, "echo": True, "logprobs": 3, **SAMPLED}
    body = {**CHANGED, "return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(**request, extra_body=body, stream=stream)  # type: ignore[call-overload]
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    made = [token for choice in choices for token in choice.token_ids]
    assert len(made) == max_tokens
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    values = [value for part in parts for value in part.token_logprobs]
    tops = [top for part in parts for top in part.top_logprobs]
    ids = tokenizer.encode(PROMPT) + made
    rows = table(model, ids)
    assert len(tokens) == len(values) == len(tops) == len(ids)
    assert (values[0], tops[0]) == (None, None), "the first token must not have a logprob"
    for row, token_id, token, value, top in zip(rows, ids[1:], tokens[1:], values[1:], tops[1:], strict=False):
        assert_close(value, row[token_id])
        assert_close(top[token], row[token_id])
        best = row.topk(3)
        assert max(top.values()) == pytest.approx(best.values[0].item(), abs=1e-4)
        assert 1 <= len(top) <= 4, "top 3 and the token itself, or fewer if several are parts of one character"
        assert all(value <= best.values[0] + 1e-4 for value in top.values())
    assert text.startswith(PROMPT)
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [0, *accumulate(map(len, tokens))][:-1]


def test_chat_returns_top_logprobs_of_prompt_and_output(
    client: openai.OpenAI, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    request = {"model": "default", "messages": STORY, "max_tokens": 12, "logprobs": True, "top_logprobs": 20, **SAMPLED}
    body = {**CHANGED, "return_token_ids": True, "prompt_logprobs": 2}
    answer = client.chat.completions.create(**request, extra_body=body)  # type: ignore[call-overload]
    prompt, made = answer.prompt_token_ids, answer.choices[0].token_ids
    rows = table(model, prompt + made)
    for row, token_id, entry in zip(rows[len(prompt) - 1 :], made, answer.choices[0].logprobs.content, strict=False):
        assert_close(entry.logprob, row[token_id])
        best = row.topk(20)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert bytes(entry.bytes) == bytes(entry.top_logprobs[0].bytes) or entry.logprob < entry.top_logprobs[0].logprob
    assert answer.prompt_logprobs[0] is None
    for row, token_id, entries in zip(rows, prompt[1:], answer.prompt_logprobs[1:], strict=False):
        actual = entries[str(token_id)]
        assert_close(actual["logprob"], row[token_id])
        assert (row > row[token_id] + 1e-4).sum() < actual["rank"] <= (row > row[token_id] - 1e-4).sum()
        for other, found in entries.items():
            assert_close(found["logprob"], row[int(other)])
        assert {1, 2} <= {found["rank"] for found in entries.values()}


@pytest.mark.row("fastdeploy", "temp_scaled_logprobs", "top_p_normalized_logprobs")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_fastdeploy_options_scale_and_normalize_logprobs(
    client: openai.OpenAI, model: PreTrainedModel, scaled: bool, normalized: bool
) -> None:
    """FastDeploy's options: logprobs after the temperature, and renormalized over the tokens kept by ``top_p``."""
    request = {"model": "default", "prompt": PROMPT, "max_tokens": 6, "temperature": 0.6, "top_p": 0.7, "seed": 5}
    modes = {"temp_scaled_logprobs": scaled, "top_p_normalized_logprobs": normalized}
    body = {"return_token_ids": True, "ignore_eos": True, **modes}
    (choice,) = client.completions.create(**request, logprobs=5, extra_body=body).choices  # type: ignore[call-overload]
    assert len(choice.token_ids) == len(choice.logprobs.token_logprobs) == 6
    scores = table(model, choice.prompt_token_ids + choice.token_ids)[len(choice.prompt_token_ids) - 1 :]
    probabilities = (scores / (0.6 if scaled else 1)).softmax(-1)
    if normalized:
        order = probabilities.argsort(-1, descending=True)
        before = probabilities.gather(-1, order).cumsum(-1) - probabilities.gather(-1, order)
        probabilities = probabilities.scatter(-1, order, probabilities.gather(-1, order).masked_fill(before >= 0.7, 0))
        probabilities /= probabilities.sum(-1, keepdim=True)
    for logprob, token, row in zip(choice.logprobs.token_logprobs, choice.token_ids, probabilities, strict=False):
        if row[token] > 0:  # 0 if top_p removes the token at temperature 1
            assert_close(logprob, row[token].log())
        else:
            assert logprob == -9999
