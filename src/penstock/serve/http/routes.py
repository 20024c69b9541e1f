"""The routes of the application, and their part of the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from .openapi import STRING

Endpoint = Callable[[Request], Awaitable[Response]]


class Route(routing.Route):
    """A path, its methods, and who answers. A request that it matches has it as ``scope["route"]``."""

    def matches(self, scope: Scope) -> tuple[routing.Match, Scope]:
        match, matched = super().matches(scope)
        return match, matched if match is routing.Match.NONE else {**matched, "route": self}


class Routes(list[Route]):
    """The routes in their order: the first that matches a request answers it."""

    def __init__(self) -> None:
        self.operations: dict[str, dict[str, Any]] = {}
        """``paths`` of the OpenAPI document: operations by path and method."""

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
