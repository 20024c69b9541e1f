"""Paths shared by several dialects. The dialect of a request is recognized by its body and headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from penstock.core import PenstockError

from ..http.access import Access
from ..http.body import check_elements, read_object
from ..http.error_format import ErrorFormat
from ..http.request_record import record_of
from ..http.routes import Endpoint, Route, Routes
from ..models.served_models import RECEIVED, ServedModels

COMPLETIONS = ("/v1/completions", "/v1/chat/completions/completions")
CHATS = ("/v1/chat/completions", "/v1/chat/completions/chat/completions")
"""The second path of ``COMPLETIONS`` and ``CHATS`` is requested by OpenAI's client if its ``base_url`` ends in
``/v1/chat/completions``, as PaddleNLP's documentation recommends."""


class SharedPathDialect(Protocol):
    """A dialect on the shared paths."""

    error_format: ErrorFormat
    fields: frozenset[str] | None = None
    """``matches`` is called only for bodies with at least one of these fields; None: for all bodies."""
    header: str | None = None
    """``matches`` is called only for requests with this header; None: for all requests."""

    def matches(self, raw_request: Request, fields: dict[str, Any]) -> bool:
        """Return True if a request is in this dialect; ``fields`` is its parsed body."""
        ...

    def completion(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        """Respond to a completion request whose body had ``size`` bytes. Raises ``PenstockError`` if it is invalid."""
        ...

    def chat(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        """Respond to a chat request. Arguments and errors as in ``completion``."""
        ...


def dispatch_by_body(
    routes: Routes,
    served_models: ServedModels,
    path: str,
    matches: Callable[[dict[str, Any]], bool],
    endpoint: Endpoint,
) -> None:
    """Route POST requests with a matching body to ``endpoint``, and all others to the existing endpoint of ``path``.

    Args:
        matches: returns True for a parsed body that ``endpoint`` handles.
    """
    route = next(route for route in routes if route.path == path and "POST" in (route.methods or ()))
    existing: Endpoint = route.endpoint

    async def dispatch(raw_request: Request) -> Response:
        body = await served_models.receive(raw_request, served_models.max_body_size)
        raw_request.scope[RECEIVED] = body  # the selected endpoint reads the body from the scope
        record = record_of(raw_request.scope)
        try:
            matched = await served_models.parse(
                record, len(body), lambda: (check_elements(body), matches(read_object(body)))
            )
        except PenstockError:  # the existing endpoint parses the body again and reports the error
            matched = False
        return await (endpoint if matched else existing)(raw_request)

    routes[routes.index(route)] = Route(path, dispatch, access=route.access, methods=["POST"])


def add_shared_routes(
    routes: Routes,
    served_models: ServedModels,
    dialects: Sequence[SharedPathDialect],
    described: dict[str, dict[str, Any]],
) -> None:
    """Add the shared paths. The first dialect that matches a request handles it.

    Args:
        described: OpenAPI operations of ``COMPLETIONS[0]`` and ``CHATS[0]``.
    """

    def recognize(raw_request: Request, fields: dict[str, Any]) -> SharedPathDialect:
        dialect = next(
            dialect
            for dialect in dialects
            if (dialect.fields is None or not dialect.fields.isdisjoint(fields))
            and (dialect.header is None or dialect.header in raw_request.headers)
            and dialect.matches(raw_request, fields)
        )
        record_of(raw_request.scope).error_format = dialect.error_format
        return dialect

    async def create_completion(raw_request: Request) -> Response:
        def answer(body: bytes) -> Response:
            fields = read_object(body)
            return recognize(raw_request, fields).completion(raw_request, fields, len(body))

        return await served_models.read(raw_request, answer)

    async def create_chat(raw_request: Request) -> Response:
        def answer(body: bytes) -> Response:
            fields = read_object(body)
            return recognize(raw_request, fields).chat(raw_request, fields, len(body))

        return await served_models.read(raw_request, answer, served_models.max_body_size)

    for paths, endpoint, summary in (
        (COMPLETIONS, create_completion, "Complete a prompt"),
        (CHATS, create_chat, "Create a chat completion"),
    ):
        for path in paths:
            operation = described[paths[0]]
            routes.add(path, endpoint, access=Access.INFERENCE, method="POST", summary=summary, described=operation)
