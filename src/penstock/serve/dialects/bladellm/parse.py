"""Conversion of BladeLLM's requests to OpenAI's: defaults, names of models."""

from __future__ import annotations

from typing import Any, TypeVar

from penstock.core import Code, PenstockError
from penstock.serve.chat.request import ChatRequest
from penstock.serve.dialects.openai.parse import parse
from penstock.serve.dialects.openai.requests import CompletionRequest
from penstock.serve.http.lax import convert_types
from penstock.serve.http.unknown_fields import UnknownFields
from penstock.serve.models.service import ModelService

T = TypeVar("T", CompletionRequest, ChatRequest)

DEFAULTS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 1.0}
"""They apply instead of the checkpoint's ``generation_config.json``."""
SAMPLING_DEFAULTS = ("top_p", "top_k", "min_p", "temperature")
"""Defaults that do not apply to beam search."""
UNSUPPORTED_FIELDS = ("return_token_ids", "prompt_logprobs")
"""Fields whose result BladeLLM's response format has no place for."""


def read(fields: dict[str, Any], schema: type[T], service: ModelService, unknown: UnknownFields) -> T:
    """Parse a request. ``model`` selects an adapter; other names are ignored.

    Raises ``PenstockError`` as OpenAI's ``parse`` does.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    convert_types(given, schema, "pydantic")
    if isinstance(model := given.get("model"), str) and model not in service.gateway.engine_pool.adapters:
        del given["model"]
    for name in UNSUPPORTED_FIELDS:
        if given.get(name) not in (None, False):
            raise PenstockError(Code.UNSUPPORTED, f"{name}: has no place in BladeLLM's answers", name)
    own = given.get("use_beam_search") is True
    defaults = {name: value for name, value in DEFAULTS.items() if not (own and name in SAMPLING_DEFAULTS)}
    if "max_completion_tokens" not in given:
        defaults["max_tokens"] = service.gateway.input_processor.default_max_tokens
    return parse(defaults | given, schema, unknown)


def model_name(fields: dict[str, Any]) -> str | None:
    """The ``model`` of a request."""
    name = fields.get("model")
    return name if isinstance(name, str) else None
