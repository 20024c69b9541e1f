"""The models that an API process serves, and what they have in common."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from penstock.config.options import ServerOptions
from penstock.core import Code, PenstockError
from penstock.engine.service.client import STARTING
from penstock.frontend.gateway import Gateway

from ..http.body import read_body
from ..metrics import Engines, Metrics
from .messages import ANY_MODEL, ServedModel
from .service import Service

LEAST_BODY, BYTES_A_TOKEN = 2**20, 64
"""Of what a context can hold, with all there is around it in JSON."""


class Services:
    """Models by name. Where a request names none, it is for the first of those that are there."""

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.options = options
        self.metrics = metrics
        self.created = int(time.time())
        self._models: tuple[ServedModel, ...] = ()
        self._told = False
        self._found: dict[str, Service] = {}
        self._open = 0

    def __iter__(self) -> Iterator[Service]:
        return (self._found[model.name] for model in self._models if model.name in self._found)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """All there are, those that are not loaded, too."""
        return self._models

    def know(self, models: tuple[ServedModel, ...]) -> None:
        """These are the models that there are."""
        self._models, self._told = models, True

    def add(self, model: ServedModel, gateway: Gateway) -> Service:
        """Serve a model."""
        metrics = self.metrics.of(model.name)
        service = Service(gateway, self.options, model.names, model.kserve, metrics, self._place)
        self._found[model.name] = service
        return service

    def remove(self, name: str) -> Service:
        """Serve it no more; what is open goes on."""
        return self._found.pop(name)

    def find(self, name: str | None = None) -> Service:
        """The model that a client asks for, by its own name or an adapter's.

        Raises ``PenstockError``: ``not_found`` where it is not there, ``unavailable`` where it soon is, or no model is.
        """
        if name is None or name in ANY_MODEL:
            return self._first()
        for service in self:
            if service.has(name):
                return service
        known = ", ".join(each for service in self for each in [*service.names, *service.gateway.engine.adapters])
        model = next((model for model in self._models if name in model.names), None)
        if model is None:
            self.check()  # it may be an adapter of one that is not there yet
        else:
            self.check_coming(model)
            words = f"the model {name!r} is not served: {model.reason}; there is {known or 'none'}"
            raise PenstockError(Code.NOT_FOUND, words, "model")
        raise PenstockError(Code.NOT_FOUND, f"the model {name!r} is not here; there is {known or 'none'}", "model")

    def find_or_first(self, name: str | None) -> Service:
        """Likewise, for dialects in which a model's name may be any."""
        return next((service for service in self if name is not None and service.has(name)), None) or self._first()

    def check_coming(self, model: ServedModel | None) -> None:
        """Raises ``PenstockError`` (``unavailable``) where one that is not there soon is, or nobody knows yet."""
        if not self._told or (model and model.coming):
            raise PenstockError.of(STARTING)

    def check(self) -> None:
        """Raises ``PenstockError`` (``unavailable``) where a model's engine is not there, or not yet."""
        if not self._told or any(model.wanted and model.name not in self._found for model in self._models):
            raise PenstockError.of(STARTING)
        for service in self:
            service.gateway.engine.check()

    @property
    def open(self) -> int:
        """Requests for any model that have not ended."""
        return self._open

    @property
    def engines(self) -> Engines:
        """What the engines told last, and their options, by model."""
        serving = [(model, self._found[model.name]) for model in self._models if model.name in self._found]
        return {model.name: (service.gateway.engine.stats, model.configuration.engine) for model, service in serving}

    @property
    def max_body_size(self) -> int:
        """Bytes a request may have.

        Raises ``PenstockError`` (``unavailable``) while there is no engine to tell how long its context is.
        """
        if self.options.max_body_size:
            return self.options.max_body_size
        engines = [service.gateway.engine for service in self]
        lengths = [engine.engine.max_model_len for engine in engines if engine.engine]
        if not lengths:
            self.check()
        return max([LEAST_BODY, *(BYTES_A_TOKEN * length for length in lengths)])

    async def read(self, request: Request) -> bytes:
        """The body of a request for any model.

        Raises ``PenstockError`` where it is too large, or its client falls silent or goes in the middle of it.
        """
        return await read_body(request, self.max_body_size, self.options.client_timeout)

    def _first(self) -> Service:
        if (first := next(iter(self), None)) is None:
            self.check()
            raise PenstockError(Code.UNAVAILABLE, "no model is loaded")
        return first

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Raises ``PenstockError`` (``overloaded``) where all are taken."""
        most = self.options.max_concurrency
        if self._open >= most:
            raise PenstockError(Code.OVERLOADED, f"{most} requests are open", "max_concurrency", most)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
