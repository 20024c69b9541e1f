"""FastDeploy's management endpoints: ``/config-info``, ``/v1/abort_requests``, and ``dynamic_load_weight`` routes."""

from __future__ import annotations

from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.config.secrets import shown
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.engine.modes import KV_CACHE, WEIGHTS
from penstock.engine.service.actions import PauseGeneration, ResumeGeneration, Sleep, WakeUp
from penstock.engine.service.control import UpdateWeights

from ...http.access import Access
from ...http.body import Reading, RequestBody, Unsupported
from ...http.openapi import OBJECT
from ...http.reply import Json
from ...http.request_record import record_of
from ...http.routes import Routes
from ...models.served_models import ServedModels
from ..endpoints import DialectRoutes
from ..openai.schema import ErrorResponse
from ..operations import Operator, is_paused, is_sleeping

PREFIXES = ("chatcmpl-", "cmpl-")
"""Prefixes of response ids; the request id follows."""
TAGS = {"weight": WEIGHTS, "kv_cache": KV_CACHE}
"""Memory tag of FastDeploy's ``/v1/sleep`` and ``/v1/wakeup`` → memory tag of the engine."""


class Abort(RequestBody, kw_only=True, forbid_unknown_fields=True):
    req_ids: list[str] | None = None
    """Response ids or request ids (``X-Request-Id``)."""
    abort_all: bool = False


class UpdateWeightsRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to reload the weights from the folder they were loaded from."""

    reading: ClassVar = Reading(
        unsupported={
            "version": Unsupported("weights are reloaded from their folder; POST /v1/weights/reload loads another"),
            "verify_checksum": Unsupported("weights are read from a folder, not transferred", neutral=(False,)),
        }
    )

    version: str | None = None
    verify_checksum: bool | None = None


SCHEMAS = (Abort, UpdateWeightsRequest)


def add_routes(routes: Routes, served_models: ServedModels, operator: Operator) -> None:
    """Add FastDeploy's management routes; the ``dynamic_load_weight`` routes require ``server_dev_mode``."""
    api = DialectRoutes(routes, served_models, schemas=SCHEMAS, failure=ErrorResponse)

    async def config_info(_: Request) -> Response:
        models = {model.name: shown(model.configuration) for model in served_models.models}
        first: dict[str, Any] = next(iter(models.values()), {})
        return Json(first | {"models": models} if len(models) > 1 else first)

    async def abort_requests(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, Abort)
        if not request.abort_all and not request.req_ids:
            raise invalid("req_ids", "is missing; give request ids, or abort_all")
        requested = {_without_prefix(name): name for name in request.req_ids or ()}
        aborted, running_ids, tenant = [], set(), record_of(raw_request.scope).tenant
        for service in served_models:
            running = service.gateway.running(tenant)
            names = list(running if request.abort_all else requested)
            service.gateway.cancel(names, tenant)
            found = [name for name in names if name in running]
            running_ids.update(found)
            aborted += [{"request_id": requested.get(n, n), "output_token_count": running[n]} for n in found]
        missing = [name for request_id, name in requested.items() if request_id not in running_ids]
        return Json({"status": "success", "result": {"aborted": aborted, "not_found": missing}})

    api.add("/config-info", config_info, "Server configuration, with secrets masked", access=Access.PRIVATE)
    summary = "Abort requests of this API process, by id or all"
    api.post("/v1/abort_requests", abort_requests, summary, Abort, access=Access.PRIVATE)
    if served_models.options.server_dev_mode:
        _add_weights(api, operator)


def _add_weights(api: DialectRoutes, operator: Operator) -> None:
    async def clear_load_weight(request: Request) -> Response:
        await operator.carry_out(Sleep(2), request)
        return Response()

    async def update_model_weight(request: Request) -> Response:
        await operator.carry_out(WakeUp() if is_sleeping(operator.models(request)) else UpdateWeights(), request)
        return Response()

    async def pause(request: Request) -> Response:
        await operator.carry_out(PauseGeneration(), request)
        return _success()

    async def resume(request: Request) -> Response:
        await operator.carry_out(ResumeGeneration(), request)
        return _success()

    async def paused(request: Request) -> Response:
        return Json({"is_paused": is_paused(operator.models(request))})

    async def sleep(request: Request) -> Response:
        await operator.carry_out(Sleep(1 if _tags(request) == (KV_CACHE,) else 2), request)
        return _success()

    async def wakeup(request: Request) -> Response:
        await operator.carry_out(WakeUp(_tags(request)), request)
        return _success()

    async def update_weights(request: Request) -> Response:
        await api.read(request, UpdateWeightsRequest, optional=True)
        if not is_paused(operator.models(request)):
            raise PenstockError(Code.INVALID, "the engine is not paused: POST /v1/pause first")
        await operator.carry_out(UpdateWeights(), request)
        return _success()

    for method, path, endpoint, summary, schema in (
        ("GET", "/clear_load_weight", clear_load_weight, "Free the KV cache and the weights", None),
        ("GET", "/update_model_weight", update_model_weight, "Reload the weights", None),
        ("POST", "/v1/pause", pause, "Pause generation and abort open requests", None),
        ("POST", "/v1/resume", resume, "Resume generation", None),
        ("GET", "/v1/is_paused", paused, "True if generation is paused", None),
        ("POST", "/v1/sleep", sleep, "Free the KV cache and the weights", None),
        ("POST", "/v1/wakeup", wakeup, "Restore freed KV cache and weights", None),
        ("POST", "/v1/update_weights", update_weights, "Reload the weights", UpdateWeightsRequest),
    ):
        query = ("tags", "model") if path in ("/v1/sleep", "/v1/wakeup") else ("model",)
        answer = OBJECT if path.startswith("/v1") else None
        access = Access.INFERENCE if endpoint is paused else Access.CONTROL
        api.add(path, endpoint, summary, answer, schema, method, access, query=query)


def _tags(request: Request) -> tuple[str, ...] | None:
    """Tags of the memory to free or restore; None: all. Raises ``PenstockError`` (``invalid``)."""
    names = [name for name in request.query_params.get("tags", "").split(",") if name]
    if unknown := set(names) - TAGS.keys():
        raise invalid("tags", f"must be weight or kv_cache, is {min(unknown)!r}")
    return tuple(TAGS[name] for name in names) if 0 < len(set(names)) < len(TAGS) else None


def _success() -> Response:
    return Json({"status": "success", "error_message": None, "result": None})


def _without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name
