"""PaddleNLP's dialect on the shared paths."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from penstock.serve.dialects.dispatch import Dialect
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import record_of
from penstock.serve.models.registry import ModelRegistry

from .handler import PaddleNLPHandler
from .requests import DECISIVE, OWN, names_of, parse
from .responses import PaddleNLPErrorFormat

NAME = "paddlenlp"
"""Name of the profile."""
PROMPTS = frozenset(("prompt", "prompt_token_ids"))
"""Prompt fields of OpenAI's completions."""


class PaddleNLP(Dialect):
    """Spoken where a request has a field that only PaddleNLP has, and not all that OpenAI's have: a prompt, or messages
    and a model. So whatever an OpenAI client adds, it gets an answer that it can read. Under PaddleNLP's profile a
    request that names no model is PaddleNLP's, too."""

    error_format = PaddleNLPErrorFormat()

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._preferred = registry.options.compat == NAME

    def speaks(self, request: HttpRequest, found: dict[str, Any]) -> bool:
        if not PROMPTS.isdisjoint(found) or found.keys() >= {"model", "messages"}:
            return False
        own = DECISIVE if "messages" in found else OWN
        return not own.isdisjoint(found) or (self._preferred and "model" not in found)

    def completion(self, request: HttpRequest, found: dict[str, Any], size: int) -> Response:
        record, named = record_of(request.scope), found.get("req_id")
        error_format = record.error_format = PaddleNLPErrorFormat(
            named if isinstance(named, str) else "", names_of(found)
        )
        wanted = parse(found, record.unknown)
        service = self._registry.find_or_first(wanted.model)
        return Reply.of(service, PaddleNLPHandler(service, record, wanted, size), error_format, wanted.stream)

    chat = completion
