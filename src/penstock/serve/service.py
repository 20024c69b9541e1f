"""What every dialect serves from: the gateway, the names of its model, and how full the house is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from penstock.core import Code, PenstockError
from penstock.core.options import ServerOptions
from penstock.frontend.gateway import Gateway

from .body import read_body
from .metrics import Metrics

LEAST_BODY, BYTES_A_TOKEN = 2**20, 64
"""Of what a context can hold, with all there is around it in JSON."""
DEFAULT_NAME = "default"
"""A model's name that every server knows."""


class Service:
    """One model at work.

    Args:
        names: under which clients ask for it, the first being the one it answers with.
    """

    def __init__(self, gateway: Gateway, options: ServerOptions, names: tuple[str, ...], metrics: Metrics) -> None:
        self.gateway = gateway
        self.options = options
        self.names = names
        self.metrics = metrics
        self.created = int(time.time())
        self._open = 0

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def template_variables(self) -> frozenset[str]:
        """What the model's chat template reads."""
        return self.gateway.preparer.tokenizer.template.variables

    @property
    def timeout(self) -> float | None:
        """Seconds a request may take."""
        return self.options.request_timeout or None

    @property
    def max_body_size(self) -> int:
        """Bytes a request may have.

        Raises ``PenstockError`` (``unavailable``) while there is no engine to tell how long its context is.
        """
        return self.options.max_body_size or max(LEAST_BODY, BYTES_A_TOKEN * self.gateway.engine.check().max_model_len)

    async def read(self, request: Request) -> bytes:
        """A request's body.

        Raises ``PenstockError`` where it is too large, or its client falls silent or goes in the middle of it.
        """
        return await read_body(request, self.max_body_size, self.options.client_timeout)

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a client asks for as a model, nothing for the model as it is.

        Raises ``PenstockError`` (``not_found``) for a model that is not here.
        """
        if name is None or name == DEFAULT_NAME or name in self.names:
            return ""
        adapters = self.gateway.engine.adapters
        if name not in adapters:
            known = ", ".join([*self.names, *adapters])
            raise PenstockError(Code.NOT_FOUND, f"the model {name!r} is not here; there is {known}", "model")
        return name

    @contextmanager
    def place(self) -> Iterator[None]:
        """A request's place among those open at the same time.

        Raises ``PenstockError`` (``overloaded``) where all are taken.
        """
        most = self.options.max_concurrency
        if self._open >= most:
            raise PenstockError(Code.OVERLOADED, f"{most} requests are open", "max_concurrency", most)
        self._open += 1
        self.metrics.open.inc()
        try:
            yield
        finally:
            self._open -= 1
            self.metrics.open.dec()
