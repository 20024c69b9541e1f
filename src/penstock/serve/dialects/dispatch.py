"""Paths that several dialects share; the dialect of a request is recognized by its body and headers."""

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
"""The second path of each is the one that OpenAI's client requests where its ``base_url`` ends in
``/v1/chat/completions``, as PaddleNLP's documentation shows it."""


class SharedPathDialect(Protocol):
    """A dialect on the shared paths."""

    error_format: ErrorFormat
    fields: frozenset[str] | None = None
    """Fields of which its requests have one; None where they need not."""
    header: str | None = None
    """Header that its requests have; None where they need none."""

    def matches(self, raw_request: Request, fields: dict[str, Any]) -> bool:
        """Whether a request is in this dialect; ``fields`` is its parsed body."""
        ...

    def completion(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        """The response to a completion request whose body had ``size`` bytes. Raises ``PenstockError`` where it is
        invalid."""
        ...

    def chat(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        """The response to a chat request; otherwise as ``completion``."""
        ...


def answer_by_body(
    routes: Routes,
    served_models: ServedModels,
    path: str,
    matches: Callable[[dict[str, Any]], bool],
    endpoint: Endpoint,
) -> None:
    """Have ``endpoint`` answer what is sent to a path of another dialect, which has been added, where the body is its.

    Args:
        matches: whether a body is of the endpoint's dialect.
    """
    route = next(route for route in routes if route.path == path and "POST" in (route.methods or ()))
    other: Endpoint = route.endpoint

    async def either(raw_request: Request) -> Response:
        body = await served_models.receive(raw_request, served_models.max_body_size)
        raw_request.scope[RECEIVED] = body  # for the endpoint
        record = record_of(raw_request.scope)
        try:
            is_its = await served_models.parse(
                record, len(body), lambda: (check_elements(body), matches(read_object(body)))
            )
        except PenstockError:  # which the other one reports
            is_its = False
        return await (endpoint if is_its else other)(raw_request)

    routes[routes.index(route)] = Route(path, either, access=route.access, methods=["POST"])


def add_shared_routes(
    routes: Routes,
    served_models: ServedModels,
    dialects: Sequence[SharedPathDialect],
    described: dict[str, dict[str, Any]],
) -> None:
    """Add the shared paths. The first dialect that recognizes a request answers it.

    Args:
        described: operations of the OpenAPI document for the first path of each.
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
        (COMPLETIONS, create_completion, "Continue a prompt"),
        (CHATS, create_chat, "Answer a chat"),
    ):
        for path in paths:
            of_path = described[paths[0]]
            routes.add(path, endpoint, access=Access.INFERENCE, method="POST", summary=summary, described=of_path)
