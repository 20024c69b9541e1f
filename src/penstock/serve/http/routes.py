"""What each dialect adds to the application: routes, their part of the OpenAPI document, formats of errors."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from .error_formats import ErrorFormats
from .openapi import STRING

Endpoint = Callable[[Request], Awaitable[Response]]


class Route(routing.Route):
    """A path, its methods, and who answers. A request that it matches has it as ``scope["route"]``."""

    def matches(self, scope: Scope) -> tuple[routing.Match, Scope]:
        match, matched = super().matches(scope)
        return match, matched if match is routing.Match.NONE else {**matched, "route": self}


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
        method: str = "GET",
        summary: str,
        described: dict[str, Any] | None = None,
    ) -> None:
        """Add a route, and its operation of the OpenAPI document.

        Args:
            path: as in Starlette: ``/models/{name}``, or ``{name:path}`` for a name with slashes.
            summary: of the operation, for the OpenAPI document.
            described: the operation as ``openapi.operation`` returns it. By default one whose response is not
                described.
        """
        route = Route(path, endpoint, methods=[method])
        self.append(route)
        named = [{"name": name, "in": "path", "required": True, "schema": STRING} for name in route.param_convertors]
        described = described or {"responses": {"200": {"description": "the answer"}}}
        self.operations.setdefault(route.path_format, {})[method.lower()] = {
            "summary": summary,
            "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method.lower()}"),
            **described,
            "parameters": [*named, *described.get("parameters", [])],
        }
