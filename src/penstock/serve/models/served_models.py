"""The models that an API process serves, by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.requests import Request

from penstock.config.options import ServerOptions
from penstock.core import Code, Failure, PenstockError
from penstock.engine.service.client import STARTING
from penstock.frontend.gateway import Gateway

from ..http.body import read_body
from ..metrics import EngineStats, Metrics
from .messages import ANY_MODEL, ServedModel
from .service import ModelService

if TYPE_CHECKING:
    from penstock.tracing import Tracer

PAUSED = Failure(Code.UNAVAILABLE, "the engine is paused: requests wait until it is resumed")
MIN_BODY_SIZE, BYTES_PER_TOKEN = 2**20, 64
"""Default of ``max_body_size``: ``BYTES_PER_TOKEN`` (JSON syntax included) times the longest context length in tokens,
at least ``MIN_BODY_SIZE``."""
IMAGE_BODY_SIZE = 2**26
"""The least default where a model sees images, which requests bring as base64."""


class ServedModels:
    """Served models by name. A request that names no model gets the first one."""

    def __init__(self, options: ServerOptions, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self.options = options
        self.metrics = metrics
        self.tracer = tracer
        """Makes spans of requests; None for no traces."""
        self.created = int(time.time())
        self._models: tuple[ServedModel, ...] = ()
        self._received = False
        self._services: dict[str, ModelService] = {}
        self._open = 0
        self._max_body_size = MIN_BODY_SIZE

    def __iter__(self) -> Iterator[ModelService]:
        return (self._services[model.name] for model in self._models if model.name in self._services)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """All models of the server, loaded or not."""
        return self._models

    def set_models(self, models: tuple[ServedModel, ...]) -> None:
        """Replace the list of models, as the supervisor announced it."""
        self._models, self._received = models, True

    def add(self, model: ServedModel, gateway: Gateway) -> ModelService:
        """Start serving a model."""
        metrics = self.metrics.of(model.name)
        service = ModelService(gateway, self.options, model.names, model.kserve, metrics, self._admit)
        self._services[model.name] = service
        return service

    def remove(self, name: str) -> ModelService:
        """Stop serving a model; open requests go on."""
        return self._services.pop(name)

    def find(self, name: str | None = None) -> ModelService:
        """The model that a request's ``model`` names, by one of its names or an adapter's.

        Raises ``PenstockError``: ``not_found`` where it is not served, ``unavailable`` where it is being loaded, or no
        model is.
        """
        if name is None:
            return self._first()
        for service in self:
            if service.has(name):
                return service
        if name in ANY_MODEL:
            return self._first()
        known = ", ".join(each for service in self for each in [*service.names, *service.gateway.engine_pool.adapters])
        model = next((model for model in self._models if name in model.names), None)
        if model is None:
            self.check_alive()  # it may be an adapter of a model that is being loaded
        else:
            self.check_expected(model)
            message = f"the model {name!r} is not served: {model.reason}; available: {known or 'none'}"
            raise PenstockError(Code.NOT_FOUND, message, "model")
        raise PenstockError(Code.NOT_FOUND, f"the model {name!r} does not exist; available: {known or 'none'}", "model")

    def has(self, name: object) -> bool:
        """Whether a name is that of a served model or adapter, or one that any model answers to."""
        return isinstance(name, str) and (name in ANY_MODEL or any(service.has(name) for service in self))

    def find_or_first(self, name: str | None) -> ModelService:
        """As ``find``, but returns the first model for an unknown name, for dialects that ignore ``model``."""
        return next((service for service in self if name is not None and service.has(name)), None) or self._first()

    def check_expected(self, model: ServedModel | None) -> None:
        """Raises ``PenstockError`` (``unavailable``) where the model is being loaded, or the list is not known yet."""
        if not self._received or (model and model.expected):
            raise PenstockError.of(STARTING)

    def check_alive(self) -> None:
        """Raises ``PenstockError`` (``unavailable``) unless every required model is served by a live engine, be it
        asleep."""
        if not self._received or any(model.required and model.name not in self._services for model in self._models):
            raise PenstockError.of(STARTING)
        for service in self:
            service.gateway.engine_pool.check_alive()

    def check(self) -> None:
        """Raises ``PenstockError`` (``unavailable``) unless requests for every required model are computed now."""
        self.check_alive()
        for service in self:
            service.gateway.engine_pool.require_engine()
            if all(state.is_paused for state in service.gateway.engine_pool.states):
                raise PenstockError.of(PAUSED)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of all engines: several of a model where their results may differ."""
        return sorted({one for service in self for one in service.gateway.engine_pool.fingerprints})

    @property
    def num_open_requests(self) -> int:
        """Number of open requests, of all models."""
        return self._open

    @property
    def engine_stats(self) -> EngineStats:
        """By model: the last statistics of its engine, and its options."""
        serving = [(model, self._services[model.name]) for model in self._models if model.name in self._services]
        return {
            model.name: (service.gateway.engine_pool.stats, model.configuration.engine) for model, service in serving
        }

    @property
    def max_body_size(self) -> int:
        """Largest request body, bytes. While no engine is ready, the last one that depended on an engine, so that a
        request is read, and its error has its dialect's format."""
        if self.options.max_body_size:
            return self.options.max_body_size
        engines = [service.gateway.engine_pool for service in self]
        lengths = [engine.engine.max_model_len for engine in engines if engine.engine]
        if lengths:
            smallest = IMAGE_BODY_SIZE if any(service.sees_images for service in self) else MIN_BODY_SIZE
            self._max_body_size = max(smallest, *(BYTES_PER_TOKEN * length for length in lengths))
        return self._max_body_size

    async def read_body(self, request: Request) -> bytes:
        """Read a request's body; the same again where it has been read.

        Raises ``PenstockError``: ``too_large``, ``timeout`` where the client stops sending, ``cancelled`` where it
        disconnects; ``unavailable`` for a large body where no engine has told how large it may be.
        """
        if not hasattr(request.state, "body"):
            try:
                request.state.body = await read_body(request, self.max_body_size, self.options.client_timeout)
            except PenstockError as error:
                if error.failure.code is Code.TOO_LARGE and not self.options.max_body_size:
                    self.check_alive()
                raise
        return bytes(request.state.body)

    def _first(self) -> ModelService:
        if (first := next(iter(self), None)) is None:
            self.check_alive()
            raise PenstockError(Code.UNAVAILABLE, "no model is loaded")
        return first

    @contextmanager
    def _admit(self) -> Iterator[None]:
        """Raises ``PenstockError`` (``overloaded``) where ``max_concurrency`` requests are open."""
        maximum = self.options.max_concurrency
        if self._open >= maximum:
            raise PenstockError(Code.OVERLOADED, f"{maximum} requests are open", "max_concurrency", maximum)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
