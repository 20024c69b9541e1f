"""One served model, as the dialects see it: its gateway, names, options and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from penstock.config.options import ServerOptions
from penstock.core import Code, PenstockError
from penstock.frontend.gateway import Gateway

from ..http.body import BodyParser
from ..metrics import ModelMetrics
from .messages import ANY_MODEL


class ModelService:
    """One served model.

    Args:
        names: names that clients use for it; the first is in its answers.
        kserve: models of the KServe v2 protocol over it: name → kind.
        admission: context manager that counts a request among those of all models.
        parser: parses requests of all models.
    """

    def __init__(
        self,
        gateway: Gateway,
        options: ServerOptions,
        names: tuple[str, ...],
        kserve: Mapping[str, str],
        metrics: ModelMetrics,
        admission: Callable[[], AbstractContextManager[None]],
        parser: BodyParser,
    ) -> None:
        self.gateway = gateway
        self.options = options
        self.names = names
        self.kserve = kserve
        self.metrics = metrics
        self.parser = parser
        """Parses requests of this and the other models."""
        self._admission = admission
        self._open = 0
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the model's chat templates read, with or without tools."""
        self.gateway.input_processor.check_chats()
        tokenizer = self.gateway.input_processor.tokenizer
        return tokenizer.template.variables | tokenizer.template_for(tools=True).variables

    @property
    def sees_images(self) -> bool:
        """Whether prompts may have images."""
        return self.gateway.input_processor.media.sees_images

    @property
    def timeout(self) -> float | None:
        """Longest duration of a request, seconds; None is any."""
        return self.options.request_timeout or None

    def has(self, name: str) -> bool:
        """Whether ``name`` is one of the model's names or of its LoRA adapters."""
        return name in self.names or name in self.gateway.engine_pool.adapters

    def adapter_of(self, name: str | None) -> str:
        """The LoRA adapter that a request's ``model`` names; empty for the base model.

        Raises ``PenstockError`` (``not_found``) for an unknown model.
        """
        if name is None or name in self.names:
            return ""
        adapters = self.gateway.engine_pool.adapters
        if name in adapters:
            return name
        if name in ANY_MODEL:
            return ""
        known = ", ".join([*self.names, *adapters])
        raise PenstockError(Code.NOT_FOUND, f"the model {name!r} does not exist; available: {known}", "model")

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as open.

        Raises ``PenstockError`` (``overloaded``) where ``max_concurrency`` are open.
        """
        with self._admission():
            self.metrics.open_requests.inc()
            self._open += 1
            self.idle.clear()
            try:
                yield
            finally:
                self.metrics.open_requests.dec()
                self._open -= 1
                if not self._open:
                    self.idle.set()
