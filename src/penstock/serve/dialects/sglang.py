"""SGLang's endpoints for RL trainers: update weights from disk, free and restore memory, pause generation."""

from __future__ import annotations

from typing import ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core import PenstockError
from penstock.engine.modes import KV_CACHE, TAGS, PauseMode
from penstock.engine.service.actions import PauseGeneration, ResumeGeneration, Sleep, WakeUp

from ..http.access import Access
from ..http.body import Reading, RequestBody, Unsupported
from ..http.routes import Routes
from ..http.status import STATUS
from .endpoints import DialectRoutes
from .openai.schema import ErrorResponse
from .operations import Operator

UNSUPPORTED = {
    "weight_version": Unsupported("the version is computed from the weights; GET /v1/weights returns the version"),
    "load_format": Unsupported("only safetensors is supported", ("safetensors",)),
    "is_async": Unsupported("the response is always sent after the new weights are in use", (False,)),
    "flush_cache": Unsupported("prefixes cached with other weights are never reused", (True,)),
}
MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "keep"}
"""SGLang's pause mode → pause mode of the engine."""


class UpdateFromDisk(RequestBody, kw_only=True, forbid_unknown_fields=True):
    reading: ClassVar = Reading(unsupported=UNSUPPORTED)

    model_path: str
    abort_all_requests: bool = False
    keep_pause: bool = False
    load_format: str | None = None
    weight_version: str | None = None
    is_async: bool | None = None
    flush_cache: bool | None = None
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None
    token_step: int | None = None


class MemoryTags(RequestBody, kw_only=True, forbid_unknown_fields=True):
    tags: list[Literal["weights", "kv_cache"]] | None = None


class PauseRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["abort", "in_place", "retract"] = "abort"


SCHEMAS = (UpdateFromDisk, MemoryTags, PauseRequest)


def add_routes(routes: Routes, operator: Operator) -> None:
    """Add SGLang's routes if ``server_dev_mode`` is set."""
    if not operator.served_models.options.server_dev_mode:
        return
    api = DialectRoutes(routes, operator.served_models, schemas=SCHEMAS, failure=ErrorResponse)

    async def update_weights_from_disk(request: Request) -> Response:
        body, _ = await api.read(request, UpdateFromDisk)
        if body.abort_all_requests:
            await operator.carry_out(PauseGeneration(), request)
        message, status = "Succeeded to update model weights.", 200
        try:
            for service in operator.models(request)[:1]:
                await operator.reload(service, body.model_path)
        except PenstockError as error:
            message, status = error.failure.message, STATUS[error.failure.code]
        if body.abort_all_requests and not body.keep_pause:
            await operator.carry_out(ResumeGeneration(), request)
        return JSONResponse({"success": status == 200, "message": message, "num_paused_requests": 0}, status)

    async def release_memory_occupation(request: Request) -> Response:
        tags = (await api.read(request, MemoryTags, optional=True))[0].tags
        await operator.carry_out(Sleep(1 if tags == [KV_CACHE] else 2), request)
        return Response()

    async def resume_memory_occupation(request: Request) -> Response:
        tags = (await api.read(request, MemoryTags, optional=True))[0].tags
        await operator.carry_out(WakeUp(None if tags is None or set(tags) == set(TAGS) else tuple(tags)), request)
        return Response()

    async def pause_generation(request: Request) -> Response:
        body, _ = await api.read(request, PauseRequest, optional=True)
        await operator.carry_out(PauseGeneration(MODES[body.mode]), request)
        return JSONResponse({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(request: Request) -> Response:
        await operator.carry_out(ResumeGeneration(), request)
        return JSONResponse({"status": "ok", "message": "Generation continued successfully."})

    for endpoint, schema, summary in (
        (update_weights_from_disk, UpdateFromDisk, "Load other weights from a folder"),
        (release_memory_occupation, MemoryTags, "Free the KV cache and the weights"),
        (resume_memory_occupation, MemoryTags, "Restore freed KV cache and weights"),
        (pause_generation, PauseRequest, "Pause generation"),
        (continue_generation, None, "Resume generation"),
    ):
        path = f"/{endpoint.__name__}"
        api.post(path, endpoint, summary, schema, access=Access.CONTROL, query=("model",))
