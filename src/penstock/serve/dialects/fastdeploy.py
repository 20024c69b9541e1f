"""FastDeploy's own paths: ``/config-info`` and ``/v1/abort_requests``."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.config.settings import SECRET
from penstock.core.errors import invalid

from ..http.body import convert, read_object
from ..http.openapi import OBJECT, operation, reference
from ..http.request_record import record_of
from ..http.routes import Routes
from ..models.served_models import ServedModels
from .openai.responses import ErrorResponse

PREFIXES = ("chatcmpl-", "cmpl-")
"""Prefixes of response ids, before the request's id."""


class Abort(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    req_ids: list[str] | None = None
    """``id`` of responses, or ``X-Request-Id``."""
    abort_all: bool = False


SCHEMAS = (Abort,)


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add ``/config-info`` and ``/v1/abort_requests``."""

    async def config_info(_: Request) -> Response:
        models = {model.name: _shown(model.configuration) for model in served_models.models}
        first = next(iter(models.values()), {})
        return _json(first | {"models": models} if len(models) > 1 else first)

    async def abort_requests(raw_request: Request) -> Response:
        request = convert(
            read_object(await served_models.read_body(raw_request)), Abort, record_of(raw_request.scope).unknown
        )
        if not request.abort_all and not request.req_ids:
            raise invalid("req_ids", "is missing; give ids, or abort_all")
        requested = {_without_prefix(name): name for name in request.req_ids or ()}
        aborted, running_ids = [], set()
        for service in served_models:
            running = service.gateway.running()
            names = list(running if request.abort_all else requested)
            service.gateway.engine_pool.cancel(names)
            here = [name for name in names if name in running]
            running_ids.update(here)
            aborted += [{"request_id": requested.get(n, n), "output_token_count": running[n]} for n in here]
        missing = [name for request_id, name in requested.items() if request_id not in running_ids]
        return _json({"status": "success", "result": {"aborted": aborted, "not_found": missing}})

    failure = reference(ErrorResponse)
    shown = "How the server is configured, but for what is secret"
    routes.add("/config-info", config_info, summary=shown, described=operation(OBJECT, failure))
    routes.add(
        "/v1/abort_requests",
        abort_requests,
        method="POST",
        summary="Cancel requests of this process by id, or all of them",
        described=operation(OBJECT, failure, reference(Abort)),
    )


def _without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _shown(configuration: msgspec.Struct) -> dict[str, Any]:
    """The configuration by section, without secrets."""
    sections: dict[str, dict[str, Any]] = msgspec.to_builtins(configuration)
    return {
        section: {name: value for name, value in options.items() if name not in SECRET}
        for section, options in sections.items()
    }


def _json(document: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
