"""Operations on whole models (weight updates, pause, sleep) for all dialects, and endpoints for the state of models.

Operations that abort or delay requests of other clients, such as ``/v1/weights/reload``, require ``server_dev_mode``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock import demo
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.engine.modes import ReloadMode
from penstock.engine.service.actions import EngineState
from penstock.engine.service.control import ModelAction, RestartEngines, UpdateWeights

from ..expert_load import expert_report
from ..http.access import Access
from ..http.body import RequestBody
from ..http.routes import Routes
from ..models.manager import ModelManager
from ..models.served_models import ServedModel, ServedModels
from .endpoints import DialectRoutes
from .openai.schema import ErrorResponse


class Reload(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to reload the weights of a model."""

    path: str = ""
    """Folder of a checkpoint with the same architecture; empty: reload the checkpoint in use."""
    running: ReloadMode = "finish"
    """How running requests are handled: they finish on the old weights, or their tokens so far are recomputed with the
    new weights and generation continues, or a new engine process loads the weights and the old one finishes them."""
    model: str | None = None
    """Name of a served model. Default: the first model."""


class Operator:
    """Operator of the served models: carries out operations, and checks the folders of weights that clients send."""

    def __init__(self, served_models: ServedModels, manager: ModelManager) -> None:
        self.served_models = served_models
        self._manager = manager

    def models(self, request: Request) -> list[ServedModel]:
        """The model in the query (``?model=``), by default all models. Raises ``PenstockError`` if it is not served."""
        if (name := request.query_params.get("model")) is not None:
            return [self.served_models.find(name)]
        return list(self.served_models)

    async def carry_out(self, operation: ModelAction, request: Request) -> None:
        """Carry out an operation on the models of a request (``models``). Raises ``PenstockError`` if it fails."""
        for service in self.models(request):
            await self._manager.operate(service, operation)

    async def reload(self, service: ServedModel, path: str, running: ReloadMode = "finish") -> EngineState:
        """Reload the weights of a model from ``path`` (empty: the folder in use); returns its new state. Raises
        ``PenstockError`` if the path is not allowed, or the reload fails."""
        folder = self._allowed(service, path) if path else ""
        await self._manager.operate(service, UpdateWeights(folder, running))
        return state_of(service)

    def _allowed(self, service: ServedModel, path: str) -> str:
        """Resolve a client's path. Raises ``PenstockError`` (``invalid``) if clients may not load weights from it."""
        try:
            folder = Path(path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise invalid("path", f"{path[:100]!r} is not a valid path") from None
        model = service.configuration.engine.model
        allowed = [Path(each).resolve() for each in self.served_models.options.allowed_local_weights_path]
        start = Path(model).resolve() if model else demo.CHAT
        if not Path(path).is_absolute() or not (folder == start or any(folder.is_relative_to(one) for one in allowed)):
            message = "must be absolute: the folder of the model, or a folder in --allowed-local-weights-path"
            raise invalid("path", f"{message}, is {path[:100]!r}")
        return str(folder)


def state_of(service: ServedModel) -> EngineState:
    """Weights and sleep state of a model."""
    return next(iter(service.gateway.engine_pool.states), EngineState())


def is_paused(services: list[ServedModel]) -> bool:
    return any(state.is_paused for service in services for state in service.gateway.engine_pool.states)


def is_sleeping(services: list[ServedModel]) -> bool:
    return any(state.asleep for service in services for state in service.gateway.engine_pool.states)


def add_routes(routes: Routes, operator: Operator) -> None:
    """Add the routes that report the state of models and, with ``server_dev_mode``, ``/v1/weights/reload``."""
    api = DialectRoutes(routes, operator.served_models, schemas=(Reload,), failure=ErrorResponse)

    async def weights(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_described(one) for one in operator.served_models]})

    async def sleeping(request: Request) -> Response:
        return JSONResponse({"is_sleeping": is_sleeping(operator.models(request))})

    async def paused(request: Request) -> Response:
        return JSONResponse({"is_paused": is_paused(operator.models(request))})

    async def experts(request: Request) -> Response:
        service = operator.served_models.find(request.query_params.get("model"))
        stats, options = operator.served_models.engine_stats[service.name]
        if not options.expert_load:
            raise PenstockError(Code.UNSUPPORTED, "expert load is not counted: start the server with --expert-load")
        return JSONResponse(expert_report(service.name, stats, options))

    api.add("/v1/weights", weights, "Weights version and sleep state of the models")
    api.add("/expert_load", experts, "Number of tokens routed to each expert, by layer")
    api.add("/is_sleeping", sleeping, "True if KV cache or weights are freed")
    api.add("/is_paused", paused, "True if generation is paused")
    if not operator.served_models.options.server_dev_mode:
        return

    async def reload(request: Request) -> Response:
        body, _ = await api.read(request, Reload, optional=True)
        service = operator.served_models.find(body.model)
        await operator.reload(service, body.path, body.running)
        return JSONResponse(_described(service))

    async def restart(request: Request) -> Response:
        await operator.carry_out(RestartEngines(), request)
        return JSONResponse({"restarted": [service.name for service in operator.models(request)]})

    api.post("/v1/weights/reload", reload, "Reload a model's weights", Reload, access=Access.CONTROL)
    api.post("/v1/restart", restart, "Replace the engine processes by new ones", access=Access.CONTROL)


def _described(service: ServedModel) -> dict[str, Any]:
    state = state_of(service)
    return {
        "model": service.name,
        "version": state.weights_version,
        "path": state.weights_path,
        "updates": state.weights_updates,
        "paused": state.is_paused,
        "asleep": list(state.asleep),
    }
