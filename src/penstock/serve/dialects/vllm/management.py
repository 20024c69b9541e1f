"""vLLM's management endpoints: ping (SageMaker), load, server and tokenizer info, prefix cache reset, abort.

vLLM has some of these endpoints in development mode only; Penstock requires the API key for them instead.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.config.secrets import shown
from penstock.core.errors import invalid
from penstock.version import __version__

from ...chat.request import NonEmptyText
from ...http.access import Access
from ...http.body import RequestBody
from ...http.request_record import record_of
from ...http.routes import Routes
from ...models.served_models import ServedModels
from ..endpoints import DialectRoutes
from ..openai.schema import ErrorResponse

PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", "embd-", "score-")
"""Prefixes of response ids; the request id follows."""


class AbortRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to abort other requests, given by response id or request id."""

    request_ids: NonEmptyText | Annotated[list[NonEmptyText], msgspec.Meta(max_length=4096)]


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    api = DialectRoutes(routes, served_models, schemas=(AbortRequest,), failure=ErrorResponse)

    async def ping(_: Request) -> Response:
        served_models.check_health()
        return Response()

    async def load(_: Request) -> Response:
        return JSONResponse({"server_load": served_models.num_open_requests})  # requests of this API process only

    async def server_info(raw_request: Request) -> Response:
        config_format = raw_request.query_params.get("config_format", "text")
        fields = {model.name: shown(model.configuration) for model in served_models.models}
        if config_format not in ("text", "json"):
            raise invalid("config_format", f"must be text or json, is {config_format[:20]!r}")
        config: Any = fields if config_format == "json" else json.dumps(fields)
        return JSONResponse({"version": __version__, "vllm_config": config})

    async def tokenizer_info(raw_request: Request) -> Response:
        model = raw_request.query_params.get("model")
        return JSONResponse(served_models.find(model).gateway.input_processor.tokenizer.info)

    async def reset_prefix_cache(_: Request) -> Response:
        served_models.check_alive()
        for service in served_models:
            await service.gateway.engine_pool.reset_prefix_cache()
        return Response()

    async def abort_requests(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, AbortRequest)
        request_ids = [request.request_ids] if isinstance(request.request_ids, str) else request.request_ids
        ids = {*request_ids, *(name.removeprefix(prefix) for name in request_ids for prefix in PREFIXES)}
        for service in served_models:
            service.gateway.cancel(sorted(ids), record_of(raw_request.scope).tenant)
        return Response()

    for method in ("GET", "POST"):
        api.add("/ping", ping, "Health check", None, method=method, access=Access.PUBLIC)
    api.add("/load", load, "Number of open requests of this API process")
    summary, query = "Server options, with secrets masked", ("config_format",)
    api.add("/server_info", server_info, summary, access=Access.PRIVATE, query=query)
    api.add("/tokenizer_info", tokenizer_info, "Tokenizer options and chat template", query=("model",))
    summary = "Clear the prefix cache"
    api.post("/reset_prefix_cache", reset_prefix_cache, summary, answer=None, access=Access.CONTROL)
    summary = "Abort requests, in any API process"
    api.post("/abort_requests", abort_requests, summary, AbortRequest, answer=None, access=Access.PRIVATE)
