"""What every dialect serves from: one model at work, its names, and its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from penstock.config.options import ServerOptions
from penstock.core import Code, PenstockError
from penstock.frontend.gateway import Gateway

from ..metrics import ModelMetrics
from .messages import ANY_MODEL


class Service:
    """One model at work.

    Args:
        names: under which clients ask for it, the first being the one it answers with.
        kserve: the models of the KServe v2 protocol over it: of which kind each is, by name.
        door: gives a request its place among those of all models.
    """

    def __init__(
        self,
        gateway: Gateway,
        options: ServerOptions,
        names: tuple[str, ...],
        kserve: Mapping[str, str],
        metrics: ModelMetrics,
        door: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.gateway = gateway
        self.options = options
        self.names = names
        self.kserve = kserve
        self.metrics = metrics
        self._door = door
        self._open = 0
        self.idle = asyncio.Event()
        """Set while it has no request open."""
        self.idle.set()

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

    def has(self, name: str) -> bool:
        """Whether it is this model, or one of its adapters."""
        return name in self.names or name in self.gateway.engine.adapters

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a client asks for as a model, nothing for the model as it is.

        Raises ``PenstockError`` (``not_found``) for a model that is not here.
        """
        if name is None or name in ANY_MODEL or name in self.names:
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
        with self._door():
            self.metrics.open.inc()
            self._open += 1
            self.idle.clear()
            try:
                yield
            finally:
                self.metrics.open.dec()
                self._open -= 1
                if not self._open:
                    self.idle.set()
