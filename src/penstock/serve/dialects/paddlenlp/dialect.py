"""PaddleNLP's dialect on the shared paths."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.serve.dialects.dispatch import CHATS, COMPLETIONS, Dialect
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import record_of
from penstock.serve.models.served_models import ServedModels

from .handler import PaddleNLPHandler
from .requests import PADDLENLP_FIELDS, SELECTING_FIELDS, field_names, parse
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

    def __init__(self, served_models: ServedModels) -> None:
        self._served_models = served_models
        self._preferred = served_models.options.compat == NAME

    def matches(self, raw_request: HttpRequest, fields: dict[str, Any]) -> bool:
        if not PROMPTS.isdisjoint(fields) or fields.keys() >= {"model", "messages"}:
            return False
        dialect_fields = SELECTING_FIELDS if "messages" in fields else PADDLENLP_FIELDS
        return not dialect_fields.isdisjoint(fields) or (self._preferred and "model" not in fields)

    def error_format_of(self, scope: Scope) -> ErrorFormat | None:
        """The error format for a request that is not read yet: PaddleNLP's under its profile, else None."""
        return self.error_format if self._preferred and scope["path"] in (*COMPLETIONS, *CHATS) else None

    def completion(self, raw_request: HttpRequest, fields: dict[str, Any], size: int) -> Response:
        record, req_id = record_of(raw_request.scope), fields.get("req_id")
        error_format = record.error_format = PaddleNLPErrorFormat(
            req_id if isinstance(req_id, str) else "", field_names(fields)
        )
        request = parse(fields, record.unknown)
        service = self._served_models.find_or_first(request.model)
        return Reply.of(service, PaddleNLPHandler(service, record, request, size), error_format, request.stream)

    chat = completion
