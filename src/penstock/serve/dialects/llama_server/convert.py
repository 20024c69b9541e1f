"""Conversion of llama-server's requests to OpenAI's completion requests."""

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
"""llama-server's field → field of OpenAI's or vLLM's completion request."""
PART_OVERHEAD = 16
"""Characters added to the size of each prompt part, to account for the fixed time of encoding a part."""
UNBOUNDED = (-1, -2)
"""Values of ``n_predict`` that allow as many tokens as fit in the context."""


async def generation_fields(request: GenerationRequest, gateway: Gateway) -> dict[str, Any]:
    """Convert the fields of ``GenerationRequest`` to fields of OpenAI's completion request."""
    fields = {to: value for name, to in NAMES.items() if (value := getattr(request, name)) is not None}
    for name in ("guided_grammar", "stop", "logprobs"):
        if not fields.get(name):
            fields.pop(name, None)
    if fields.get("seed", 0) in (-1, 2**32 - 1):  # these values request a random seed
        del fields["seed"]
    if fields.get("top_k", 0) < 0:
        fields["top_k"] = 0
    if fields.get("temperature", 0.0) < 0:  # llama-server samples greedily below 0
        fields["temperature"] = 0.0
    n_predict = -1 if request.n_predict is None else request.n_predict
    max_model_len = gateway.engine_pool.known_engine().max_model_len
    fields["max_tokens"] = max_model_len if n_predict in UNBOUNDED else max(n_predict, 1)
    if request.logit_bias:
        fields |= await _logit_bias(request.logit_bias, gateway)
    return fields | {"model": request.model, "stream": request.stream}


async def prompts_of(given: PromptField, gateway: Gateway, field: str = "prompt") -> list[str] | list[list[int]]:
    """Read the prompts of a prompt field: several prompts if ``given`` is a list of texts or lists, otherwise one.

    The prompts are tokenized unless all of them are plain texts.

    Args:
        field: name of the prompt field, for errors.

    Raises ``PenstockError`` (``invalid``) if there are too many prompts.
    """
    if isinstance(given, str):
        return [given]
    if all(isinstance(part, str) for part in given):
        return [part for part in given if isinstance(part, str)]
    if any(isinstance(part, int) for part in given):
        prompts: list[Any] = [given]
    elif len(given) > MAX_PROMPTS:
        raise invalid(field, f"has {len(given)} prompts; the maximum is {MAX_PROMPTS}", MAX_PROMPTS)
    else:
        prompts = [[part] if isinstance(part, str) else part for part in given]
    size = sum(PART_OVERHEAD + (len(part) if isinstance(part, str) else 0) for parts in prompts for part in parts)
    max_model_len = gateway.engine_pool.known_engine().max_model_len
    encode = gateway.input_processor.encode
    return await gateway.prepare(size, lambda: [_encode_mixed(parts, encode, max_model_len) for parts in prompts])


def _encode_mixed(parts: list[str | int], encode: Callable[[str, bool], list[int]], max_model_len: int) -> list[int]:
    """Tokenize a prompt of texts and token ids. Special tokens are added only if the prompt begins with a text. Texts
    beyond ``max_model_len`` tokens are not tokenized, as the prompt will be refused."""
    token_ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            token_ids.append(part)
        elif len(token_ids) <= max_model_len:
            token_ids += encode(part, i == 0)
    return token_ids


async def _logit_bias(given: Mapping[str, float | bool] | list[Any], gateway: Gateway) -> dict[str, Any]:
    if len(given) > (limit := MAX_ENTRIES["logit_bias"]):
        raise invalid("logit_bias", f"must have at most {limit} entries, has {len(given)}", limit)
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
