"""Routes of a dialect: parse request bodies, and describe the routes in the OpenAPI document."""

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
"""Schema of a body: a struct of the dialect's ``schemas``, or an OpenAPI schema; None: no JSON body."""


def tenant_of(raw_request: Request) -> str:
    return record_of(raw_request.scope).tenant


class DialectRoutes:
    """Helper of a dialect that adds routes and parses the bodies of their requests.

    Args:
        error_format: error format of the requests; None: the error format registered for the path.
        schemas: structs to describe in the OpenAPI document.
        prefix: prefix of the struct names in the OpenAPI document.
        failure: schema of error responses.
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
        """Add a route; returns its OpenAPI operation.

        Args:
            answer: schema of the response body.
            request: schema of the request body.
            streamed: True if the response may be a stream.
            query: names of the query parameters.
        """
        described = operation(
            self._described(answer), self._failure, self._described(request), streamed=streamed, query=query
        )
        self._routes.add(path, endpoint, access=access, method=method, summary=summary, described=described)
        return described

    def post(self, path: str, endpoint: Endpoint, summary: str, request: Schema = None, **options: Any) -> None:
        """Add a POST route; ``options`` are further arguments of ``add``."""
        self.add(path, endpoint, summary, request=request, method="POST", **options)

    async def read(
        self, raw_request: Request, schema: type[T], media: bool = False, optional: bool = False
    ) -> tuple[T, int]:
        """Return the parsed body and its size in bytes. Arguments and errors are those of ``handle``."""
        return await self.handle(raw_request, schema, lambda request, record, size: (request, size), media, optional)

    def endpoint(
        self, schema: type[T], answer: Callable[[T, RequestRecord, int], Response], media: bool = False
    ) -> Endpoint:
        """Make an endpoint that calls ``answer`` with the parsed body. Arguments and errors are those of ``handle``."""

        @wraps(answer)
        async def handled(raw_request: Request) -> Response:
            return await self.handle(raw_request, schema, answer, media)

        return handled

    async def handle(
        self,
        raw_request: Request,
        schema: type[T],
        work: Callable[[T, RequestRecord, int], V],
        media: bool = False,
        optional: bool = False,
    ) -> V:
        """Read and parse a body and run ``work`` on it, in a thread if the body is large.

        Args:
            work: called with the request, its record and the size of its body in bytes.
            media: allow bodies up to ``max_body_size`` (for images) instead of ``max_text_size``.
            optional: parse an empty body as ``{}``.

        Raises ``PenstockError`` as ``ServedModels.read``, ``convert`` and ``work`` do.
        """
        record = record_of(raw_request.scope)
        record.error_format = self._error_format or record.error_format

        def parse(body: bytes) -> V:
            fields = read_object(body or b"{}" if optional else body)
            return work(self.convert(fields, schema, raw_request), record, len(body))

        return await self.served_models.read(raw_request, parse, self.served_models.max_body_size if media else None)

    def convert(self, fields: dict[str, Any], schema: type[T], raw_request: Request) -> T:
        """Convert the JSON object of a request to ``schema``."""
        return convert(fields, schema, record_of(raw_request.scope).unknown)

    def _described(self, schema: Schema) -> dict[str, Any] | None:
        return reference(schema, self._prefix) if isinstance(schema, type) else schema
