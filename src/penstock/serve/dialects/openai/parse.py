"""Parsing requests, and the sampling parameters of completions."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from penstock.core import Code, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.serve.chat.request import ChatRequest
from penstock.serve.chat.sampling import sampling_of
from penstock.serve.http.body import convert
from penstock.serve.http.lax import Lax
from penstock.serve.http.unknown_fields import UnknownFields

from .requests import UNSUPPORTED_FIELDS, CompletionRequest

T = TypeVar("T", bound=msgspec.Struct)

CHAT_ONLY_FIELDS = frozenset(ChatRequest.__struct_fields__).difference(CompletionRequest.__struct_fields__)


def parse(fields: dict[str, Any], schema: type[T], unknown: UnknownFields, lax: Lax = "pydantic") -> T:
    """Convert a JSON object to a request. Removes fields that the schema does not have from ``fields``.

    Args:
        unknown: collects unknown fields.
        lax: as in ``convert``.

    Raises ``PenstockError``: ``unsupported`` for fields that are not supported yet, ``invalid`` for those of chats in
    completions, for wrong values, and for unknown fields with ``strict_requests``.
    """
    elsewhere = CHAT_ONLY_FIELDS if schema is CompletionRequest else frozenset()
    not_yet = next((refused for kind, refused in UNSUPPORTED_FIELDS.items() if issubclass(schema, kind)), {})
    for name in (not_yet.keys() | elsewhere).difference(schema.__struct_fields__).intersection(fields):
        value = fields.pop(name)
        if value is None or value in not_yet.get(name, ()):
            continue
        if name in elsewhere:
            raise invalid(name, "is for chats only")
        raise PenstockError(Code.UNSUPPORTED, f"{name}: not supported yet", name)
    return convert(fields, schema, unknown, lax)


def completion_sampling(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a completion. With ``max_tokens`` 0 one token is generated and not returned.

    Raises ``PenstockError`` (``invalid``) for contradictions.
    """
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "must be at least 1, or 0 with echo", 1)
    overrides: dict[str, Any] = {"logprobs": request.logprobs}
    if request.max_tokens is not None:
        overrides["max_tokens"] = max(request.max_tokens, 1)
    if request.echo and request.logprobs is not None:
        if request.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "logprobs with echo gives them already")
        overrides["prompt_logprobs"] = request.logprobs
    return sampling_of(request, defaults, **overrides)
