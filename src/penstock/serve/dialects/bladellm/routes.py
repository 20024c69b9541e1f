"""BladeLLM's dialect on the shared paths."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.serve.chat.request import ChatRequest
from penstock.serve.dialects.dispatch import CHATS, COMPLETIONS, Dialect
from penstock.serve.dialects.openai.chat import ChatHandler
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.requests import CompletionRequest
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import record_of
from penstock.serve.models.served_models import ServedModels

from .handler import BladeChatHandler, BladeCompletionHandler
from .parse import model_name, read
from .responses import ERROR_FORMAT


class BladeLLM(Dialect):
    """Selected by ``Authorization`` with a token without a scheme (Alibaba's EAS), or by the profile."""

    error_format = ERROR_FORMAT

    def __init__(self, served_models: ServedModels) -> None:
        self._served_models = served_models
        self._is_default = served_models.options.compat == "bladellm"

    def matches(self, raw_request: Request, fields: dict[str, Any]) -> bool:
        return self.error_format_of(raw_request.scope) is not None

    def error_format_of(self, scope: Scope) -> ErrorFormat | None:
        """The error format for a request by its headers; None where it is not BladeLLM's."""
        if scope["path"] not in (*COMPLETIONS, *CHATS):
            return None
        token = Headers(scope=scope).get("authorization", "").strip()
        bare = bool(token) and " " not in token and token.lower() not in ("bearer", "basic")
        return ERROR_FORMAT if bare or self._is_default else None

    def completion(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        service, record = self._served_models.find_or_first(model_name(fields)), record_of(raw_request.scope)
        request = read(fields, CompletionRequest, service, record.unknown)
        handler = BladeCompletionHandler(CompletionHandler(service, record, request), record.request_id)
        return Reply.of(service, handler, ERROR_FORMAT, request.stream)

    def chat(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        service, record = self._served_models.find_or_first(model_name(fields)), record_of(raw_request.scope)
        request = read(fields, ChatRequest, service, record.unknown)
        handler = BladeChatHandler(ChatHandler(service, record, request, size), record.request_id)
        return Reply.of(service, handler, ERROR_FORMAT, request.stream)
