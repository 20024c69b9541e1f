"""Routes of the application, with access classes, OpenAPI operations and error formats."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .access import Access
from .error_format import ErrorFormat
from .openapi import STRING
from .request_record import record_of

Endpoint = Callable[[Request], Awaitable[Response]]


class Route(routing.Route):
    """A Starlette route with an access class. A matched request has the route as ``scope["route"]``.

    Args:
        access: access class, checked by the application's ``OriginPolicy``.
    """

    def __init__(self, path: str, endpoint: Endpoint, *, access: Access, methods: list[str] | None = None) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.access = access

    def matches(self, scope: Scope) -> tuple[routing.Match, Scope]:
        match, matched = super().matches(scope)
        return match, matched if match is routing.Match.NONE else {**matched, "route": self}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.methods or scope["method"] in self.methods:
            scope["app"].state.origins.check(scope, self.access)
        await super().handle(scope, receive, send)


class ErrorFormats:
    """Selects the error format of a request by its dialect if known, otherwise by headers or path.

    Args:
        default: format for all other requests.
        by_head: functions that return the format for a request's path and headers, or None.
    """

    def __init__(self, default: ErrorFormat, by_head: Sequence[Callable[[Scope], ErrorFormat | None]] = ()) -> None:
        self.default = default
        self._by_head = by_head
        self._by_prefix: dict[str, ErrorFormat] = {}
        self._by_path: dict[str, ErrorFormat] = {}

    def add(self, error_format: ErrorFormat, *paths: str) -> None:
        """Use a format for all paths with one of these prefixes; the longest prefix wins."""
        self._by_prefix |= dict.fromkeys(paths, error_format)

    def add_exact(self, error_format: ErrorFormat, path: str) -> None:
        """Use a format for one path."""
        self._by_path[path] = error_format

    def of(self, scope: Scope) -> ErrorFormat:
        """Return the format for a request: by dialect if known, else by headers, else by path."""
        if (known := record_of(scope).error_format) is not None:
            return known
        for by_head in self._by_head:
            if (recognized := by_head(scope)) is not None:
                return recognized
        return self.of_path(scope["path"])

    def of_path(self, path: str) -> ErrorFormat:
        """Return the format for a path."""
        if exact := self._by_path.get(path):
            return exact
        longest = max((prefix for prefix in self._by_prefix if path.startswith(prefix)), key=len, default="")
        return self._by_prefix.get(longest, self.default)


class Routes(list[Route]):
    """List of routes; the first match answers a request.

    Args:
        error_formats: registry to which dialects add their formats.
    """

    def __init__(self, error_formats: ErrorFormats) -> None:
        self.error_formats = error_formats
        self.schemas: dict[str, list[type]] = {}
        """Schemas of the OpenAPI document, by name prefix."""
        self.operations: dict[str, dict[str, Any]] = {}
        """Operations of the OpenAPI document (``paths``), by path and method."""

    def describe(self, schemas: Iterable[type], prefix: str = "") -> None:
        """Add schemas to the OpenAPI document. Their names get the prefix, as in ``openapi.reference``."""
        self.schemas.setdefault(prefix, []).extend(schemas)

    def add(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        access: Access,
        method: str = "GET",
        summary: str,
        described: dict[str, Any] | None = None,
    ) -> None:
        """Add a route and its operation in the OpenAPI document.

        Args:
            path: Starlette path: ``/models/{name}``, or ``{name:path}`` for a name with slashes.
            summary: summary of the operation.
            described: result of ``openapi.operation``; by default an operation with an undescribed response.
        """
        route = Route(path, endpoint, access=access, methods=[method])
        self.append(route)
        named = [{"name": name, "in": "path", "required": True, "schema": STRING} for name in route.param_convertors]
        described = described or {"responses": {"200": {"description": "the answer"}}}
        self.operations.setdefault(route.path_format, {})[method.lower()] = {
            "summary": summary,
            "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method.lower()}"),
            **described,
            "parameters": [*named, *described.get("parameters", [])],
        }
