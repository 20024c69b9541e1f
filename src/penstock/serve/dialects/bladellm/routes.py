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
from penstock.serve.models.registry import ModelRegistry

from .handler import BladeChatHandler, BladeCompletionHandler
from .parse import named, read
from .responses import ERROR_FORMAT


class BladeLLM(Dialect):
    """Selected by ``Authorization`` with a token without a scheme (Alibaba's EAS), or by the profile."""

    error_format = ERROR_FORMAT

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._by_everybody = registry.options.compat == "bladellm"

    def speaks(self, request: Request, found: dict[str, Any]) -> bool:
        return self.error_format_of(request.scope) is not None

    def error_format_of(self, scope: Scope) -> ErrorFormat | None:
        """The error format for a request by its headers; None where it is not BladeLLM's."""
        if scope["path"] not in (*COMPLETIONS, *CHATS):
            return None
        token = Headers(scope=scope).get("authorization", "").strip()
        bare = bool(token) and " " not in token and token.lower() not in ("bearer", "basic")
        return ERROR_FORMAT if bare or self._by_everybody else None

    def completion(self, request: Request, found: dict[str, Any], size: int) -> Response:
        service, record = self._registry.find_or_first(named(found)), record_of(request.scope)
        wanted = read(found, CompletionRequest, service, record.unknown)
        handler = BladeCompletionHandler(CompletionHandler(service, record, wanted), record.request_id)
        return Reply.of(service, handler, ERROR_FORMAT, wanted.stream)

    def chat(self, request: Request, found: dict[str, Any], size: int) -> Response:
        service, record = self._registry.find_or_first(named(found)), record_of(request.scope)
        wanted = read(found, ChatRequest, service, record.unknown)
        handler = BladeChatHandler(ChatHandler(service, record, wanted, size), record.request_id)
        return Reply.of(service, handler, ERROR_FORMAT, wanted.stream)
