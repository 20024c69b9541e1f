"""Operations on models as a whole, for all dialects: other weights, pauses, sleep. Paths that tell the state, and
``/v1/weights/reload``.

What would end or hold up the requests of others is there with ``server_dev_mode`` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock import demo
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.engine.modes import WeightUpdateMode
from penstock.engine.service.actions import EngineState
from penstock.engine.service.control import ModelAction, UpdateWeights

from ..expert_load import expert_report
from ..http.access import Access
from ..http.body import RequestBody
from ..http.routes import Routes
from ..models.manager import ModelManager
from ..models.served_models import ServedModel, ServedModels
from .endpoints import DialectRoutes
from .openai.schema import ErrorResponse


class Reload(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Change the weights of a model."""

    path: str = ""
    """Folder of a checkpoint of the same model; by default the one in use is read again."""
    running: WeightUpdateMode = "finish"
    """Whether running requests finish on the old weights, or are computed again with the new ones and go on after what
    was generated."""
    model: str | None = None


class Operator:
    """Operations for the dialects: of which models, and with which folders."""

    def __init__(self, served_models: ServedModels, manager: ModelManager) -> None:
        self.served_models = served_models
        self._manager = manager

    def models(self, request: Request) -> list[ServedModel]:
        """The model that the URL names (``?model=``), or all. Raises ``PenstockError`` where it is not served."""
        if (name := request.query_params.get("model")) is not None:
            return [self.served_models.find(name)]
        return list(self.served_models)

    async def carry_out(self, operation: ModelAction, request: Request) -> None:
        """Carry out an operation on the models of a request. Raises ``PenstockError`` where it fails."""
        for service in self.models(request):
            await self._manager.operate(service, operation)

    async def reload(self, service: ServedModel, path: str, running: WeightUpdateMode = "finish") -> EngineState:
        """Change the weights of a model; returns the state after it. Raises ``PenstockError`` where it fails."""
        folder = self._allowed(service, path) if path else ""
        await self._manager.operate(service, UpdateWeights(folder, running))
        return state_of(service)

    def _allowed(self, service: ServedModel, path: str) -> str:
        """The folder that a client names. Raises ``PenstockError`` (``invalid``) where clients may not."""
        try:
            folder = Path(path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise invalid("path", "is no path") from None
        own = service.configuration.engine
        allowed = [Path(each).resolve() for each in self.served_models.options.allowed_local_weights_path]
        start = Path(own.model).resolve() if own.model else demo.CHAT
        if not Path(path).is_absolute() or not (folder == start or any(folder.is_relative_to(one) for one in allowed)):
            words = (
                "is neither the model's own folder nor in one that --allowed-local-weights-path allows, as full path"
            )
            raise invalid("path", words)
        return str(folder)


def state_of(service: ServedModel) -> EngineState:
    """Weights of a model, and whether it sleeps."""
    return next(iter(service.gateway.engine_pool.states), EngineState())


def is_paused(services: list[ServedModel]) -> bool:
    return any(state.is_paused for service in services for state in service.gateway.engine_pool.states)


def is_sleeping(services: list[ServedModel]) -> bool:
    return any(state.asleep for service in services for state in service.gateway.engine_pool.states)


def add_routes(routes: Routes, operator: Operator) -> None:
    """Add the paths."""
    added = DialectRoutes(routes, operator.served_models, schemas=(Reload,), failure=ErrorResponse)

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
            raise PenstockError(Code.UNSUPPORTED, "the load of experts is not counted: start with --expert-load")
        return JSONResponse(expert_report(service.name, stats, options))

    added.add("/v1/weights", weights, "Weights of the models, and whether they sleep")
    added.add("/expert_load", experts, "Tokens that chose each expert, by layer")
    added.add("/is_sleeping", sleeping, "Whether KV cache or weights are freed")
    added.add("/is_paused", paused, "Whether nothing is computed")
    if not operator.served_models.options.server_dev_mode:
        return

    async def reload(request: Request) -> Response:
        given, _ = await added.read(request, Reload, optional=True)
        service = operator.served_models.find(given.model)
        await operator.reload(service, given.path, given.running)
        return JSONResponse(_described(service))

    added.post("/v1/weights/reload", reload, "Change a model's weights", Reload, access=Access.CONTROL)


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
