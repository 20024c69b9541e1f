"""The routes of a dialect: bodies that are read, answers, and their part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..http.access import Access
from ..http.body import RequestBody, convert, read_object
from ..http.error_format import ErrorFormat
from ..http.openapi import OBJECT, operation, reference
from ..http.request_record import RequestRecord, record_of
from ..http.routes import Endpoint, Routes
from ..models.served_models import ServedModels

T = TypeVar("T", bound=RequestBody)
V = TypeVar("V")
Schema = type | dict[str, Any] | None
"""A schema of ``SCHEMAS``, or one for the document alone; None for an answer without JSON, and for no body."""


class DialectRoutes:
    """Adds the routes of a dialect.

    Args:
        error_format: of the requests that are read; by default that of their path.
        schemas: for the OpenAPI document, their names with ``prefix``.
        failure: schema of errors.
    """

    def __init__(
        self,
        routes: Routes,
        served_models: ServedModels,
        error_format: ErrorFormat | None = None,
        schemas: Iterable[type] = (),
        prefix: str = "",
        failure: Schema = OBJECT,
    ) -> None:
        self._routes = routes
        self.served_models = served_models
        self._error_format = error_format
        self._prefix = prefix
        self._failure = self._described(failure) or OBJECT
        routes.describe(schemas, prefix)

    def add(
        self,
        path: str,
        endpoint: Endpoint,
        summary: str,
        answer: Schema = OBJECT,
        request: Schema = None,
        method: str = "GET",
        access: Access = Access.INFERENCE,
        streamed: bool = False,
        query: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Add a route; returns its operation of the OpenAPI document.

        Args:
            answer, request: schemas of the bodies.
            streamed: whether the answer may be a stream.
            query: names of parameters that the URL may have.
        """
        described = operation(
            self._described(answer), self._failure, self._described(request), streamed=streamed, query=query
        )
        self._routes.add(path, endpoint, access=access, method=method, summary=summary, described=described)
        return described

    def post(self, path: str, endpoint: Endpoint, summary: str, request: Schema = None, **options: Any) -> None:
        """Add a POST route; ``options`` as in ``add``."""
        self.add(path, endpoint, summary, request=request, method="POST", **options)

    async def read(
        self, raw_request: Request, schema: type[T], media: bool = False, optional: bool = False
    ) -> tuple[T, int]:
        """The body of a request, and its size in bytes. Arguments and errors are those of ``handle``."""
        return await self.handle(raw_request, schema, lambda request, record, size: (request, size), media, optional)

    def answering(
        self, schema: type[T], answer: Callable[[T, RequestRecord, int], Response], media: bool = False
    ) -> Endpoint:
        """An endpoint that answers as ``handle`` does."""

        @wraps(answer)
        async def endpoint(raw_request: Request) -> Response:
            return await self.handle(raw_request, schema, answer, media)

        return endpoint

    async def handle(
        self,
        raw_request: Request,
        schema: type[T],
        work: Callable[[T, RequestRecord, int], V],
        media: bool = False,
        optional: bool = False,
    ) -> V:
        """Read a body, and run ``work`` on it, both in a thread where it is large.

        Args:
            work: takes the request, its record and the size of its body in bytes.
            media: whether it may be as large as one with images.
            optional: whether an empty body stands for the schema's defaults.

        Raises ``PenstockError`` as ``ServedModels.read``, ``convert`` and ``work``.
        """
        record = record_of(raw_request.scope)
        record.error_format = self._error_format or record.error_format

        def parse(body: bytes) -> V:
            fields = read_object(body or b"{}" if optional else body)
            return work(self.convert(fields, schema, raw_request), record, len(body))

        return await self.served_models.read(raw_request, parse, self.served_models.max_body_size if media else None)

    def convert(self, fields: dict[str, Any], schema: type[T], raw_request: Request) -> T:
        """A request from its JSON object."""
        return convert(fields, schema, record_of(raw_request.scope).unknown)

    def _described(self, schema: Schema) -> dict[str, Any] | None:
        return reference(schema, self._prefix) if isinstance(schema, type) else schema
