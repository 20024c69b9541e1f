"""Conversion of llama-server's requests to those of OpenAI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.errors import invalid
from penstock.core.sampling import MAX_ENTRIES
from penstock.frontend.gateway import Gateway
from penstock.serve.dialects.openai.schema import MAX_PROMPTS

from .schema import GenerationRequest, PromptField

NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "n_probs": "logprobs",
    "json_schema": "guided_json",
    "grammar": "guided_grammar",
}
"""Field → OpenAI's or vLLM's."""
PART_SIZE = 16
"""Characters that a part of a prompt counts for besides its own, as the shortest one takes time, too."""
UNBOUNDED = (-1, -2)
"""Values of ``n_predict`` for as many as the context holds."""


async def generation_fields(request: GenerationRequest, gateway: Gateway) -> dict[str, Any]:
    """Sampling parameters and what else all requests have, for OpenAI's completions."""
    fields = {to: value for name, to in NAMES.items() if (value := getattr(request, name)) is not None}
    for name in ("guided_grammar", "stop", "logprobs"):
        if not fields.get(name):
            fields.pop(name, None)
    if fields.get("seed", 0) in (-1, 2**32 - 1):  # a random one
        del fields["seed"]
    if fields.get("top_k", 0) < 0:
        fields["top_k"] = 0
    if fields.get("temperature", 0.0) < 0:  # greedy, as there
        fields["temperature"] = 0.0
    wanted = -1 if request.n_predict is None else request.n_predict
    longest = gateway.engine_pool.require_engine().max_model_len
    fields["max_tokens"] = longest if wanted in UNBOUNDED else max(wanted, 1)
    if request.logit_bias:
        fields |= await _biases(request.logit_bias, gateway)
    return fields | {"model": request.model, "stream": request.stream}


async def prompts_of(given: PromptField, gateway: Gateway, field: str = "prompt") -> list[str] | list[list[int]]:
    """The prompts: one, or with a list of texts or lists several. Texts alone stay texts.

    Args:
        field: that has them, for errors.

    Raises ``PenstockError`` (``invalid``) where they are too many.
    """
    if isinstance(given, str):
        return [given]
    if all(isinstance(part, str) for part in given):
        return [part for part in given if isinstance(part, str)]
    if any(isinstance(part, int) for part in given):
        prompts: list[Any] = [given]
    elif len(given) > MAX_PROMPTS:
        raise invalid(field, f"holds {len(given)} prompts, and at most {MAX_PROMPTS} are taken", MAX_PROMPTS)
    else:
        prompts = [[part] if isinstance(part, str) else part for part in given]
    size = sum(PART_SIZE + (len(part) if isinstance(part, str) else 0) for parts in prompts for part in parts)
    longest = gateway.engine_pool.require_engine().max_model_len
    encode = gateway.input_processor.encode
    return await gateway.prepare(size, lambda: [_encoded(parts, encode, longest) for parts in prompts])


def _encoded(parts: list[str | int], encode: Callable[[str, bool], list[int]], longest: int) -> list[int]:
    """One prompt of texts and token ids; a text at its beginning has the tokenizer's special tokens. No more parts are
    encoded of one that is longer than the context, and will be refused."""
    token_ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            token_ids.append(part)
        elif len(token_ids) <= longest:
            token_ids += encode(part, i == 0)
    return token_ids


async def _biases(given: Mapping[str, float | bool] | list[Any], gateway: Gateway) -> dict[str, Any]:
    if len(given) > (limit := MAX_ENTRIES["logit_bias"]):
        raise invalid("logit_bias", f"must hold at most {limit} entries", limit)
    entries = list(given.items() if isinstance(given, Mapping) else given)
    size = sum(len(token) for token, _ in entries if isinstance(token, str))
    biases: dict[int, float] = {}
    forbidden: list[int] = []
    for token, value in entries:
        for token_id in [token] if isinstance(token, int) else await gateway.encode(token, False, size):
            if value is False:
                forbidden.append(token_id)
            else:
                biases[token_id] = biases.get(token_id, 0.0) + float(value)
    fields: dict[str, Any] = {"logit_bias": biases} if biases else {}
    return fields | ({"bad_words_token_ids": forbidden} if forbidden else {})
