"""vLLM's development-mode endpoints: ``/sleep``, ``/wake_up``, ``/pause`` and ``/resume``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core.errors import invalid
from penstock.engine.modes import PauseMode
from penstock.engine.service.actions import PauseGeneration, ResumeGeneration, Sleep, WakeUp

from ...http.access import Access
from ...http.openapi import OBJECT
from ...http.routes import Routes
from ..endpoints import DialectRoutes
from ..openai.schema import ErrorResponse
from ..operations import Operator

MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}


def add_routes(routes: Routes, operator: Operator) -> None:
    """Add vLLM's development-mode routes if ``server_dev_mode`` is set."""
    if not operator.served_models.options.server_dev_mode:
        return

    async def sleep(request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise invalid("level", f"must be 0, 1 or 2, is {level[:20]!r}")
        await operator.carry_out(Sleep(int(level), _mode(request)), request)
        return Response()

    async def wake_up(request: Request) -> Response:
        await operator.carry_out(WakeUp(tuple(request.query_params.getlist("tags")) or None), request)
        return Response()

    async def pause(request: Request) -> Response:
        waits = request.query_params.get("wait_for_inflight_requests", "false").lower() in ("1", "true")
        clears = request.query_params.get("clear_cache", "true").lower() not in ("0", "false")
        await operator.carry_out(PauseGeneration("wait" if waits else _mode(request), clears), request)
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        await operator.carry_out(ResumeGeneration(), request)
        return JSONResponse({"status": "resumed"})

    api = DialectRoutes(routes, operator.served_models, failure=ErrorResponse)
    for path, endpoint, query, summary, answer in (
        ("/sleep", sleep, ("level", "mode"), "Free the KV cache and, with level 2, the weights", None),
        ("/wake_up", wake_up, ("tags",), "Restore the KV cache and weights freed by sleep", None),
        ("/pause", pause, ("mode", "wait_for_inflight_requests", "clear_cache"), "Pause generation", OBJECT),
        ("/resume", resume, (), "Resume generation", OBJECT),
    ):
        api.post(path, endpoint, summary, answer=answer, access=Access.CONTROL, query=(*query, "model"))


def _mode(request: Request) -> PauseMode:
    """The query parameter ``mode``: how open requests are handled. Raises ``PenstockError`` (``invalid``)."""
    mode = MODES.get(given := request.query_params.get("mode", "abort"))
    if mode is None:
        raise invalid("mode", f"must be one of {', '.join(MODES)}, is {given[:20]!r}")
    return mode
