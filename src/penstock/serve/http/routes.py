"""What each dialect adds to the application: routes, their part of the OpenAPI document, formats of errors."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .access import Access
from .error_formats import ErrorFormats
from .openapi import STRING

Endpoint = Callable[[Request], Awaitable[Response]]


class Route(routing.Route):
    """A path, its methods, who answers, and who may ask. A request that it matches has it as ``scope["route"]``.

    Args:
        access: class of the route, which the application's ``OriginPolicy`` checks.
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


class Routes(list[Route]):
    """The routes in their order: the first that matches a request answers it.

    Args:
        error_formats: to which the dialects add theirs.
    """

    def __init__(self, error_formats: ErrorFormats) -> None:
        self.error_formats = error_formats
        self.schemas: dict[str, list[type]] = {}
        """Schemas of the OpenAPI document, by the prefix of their names."""
        self.operations: dict[str, dict[str, Any]] = {}
        """``paths`` of the OpenAPI document: operations by path and method."""

    def describe(self, schemas: Iterable[type], prefix: str = "") -> None:
        """Add schemas to the OpenAPI document, their names with a prefix, as in ``openapi.reference``."""
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
        """Add a route, and its operation of the OpenAPI document.

        Args:
            path: as in Starlette: ``/models/{name}``, or ``{name:path}`` for a name with slashes.
            access: who may ask.
            summary: of the operation, for the OpenAPI document.
            described: the operation as ``openapi.operation`` returns it. By default one whose response is not
                described.
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
