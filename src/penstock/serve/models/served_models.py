"""The models that an API process serves, by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from penstock.config.options import ServerOptions
from penstock.core import Code, Failure, PenstockError
from penstock.engine.service.client import STARTING
from penstock.frontend.gateway import Gateway

from ..engine_metrics import EngineStats
from ..http.body import BodyParser, check_elements, receive_body
from ..http.body_memory import UNCOUNTED_SIZE, BodyMemory, Reservation
from ..http.request_record import RequestRecord, record_of
from ..metrics import Metrics, ModelMetrics
from .messages import ANY_MODEL, ModelEntry

if TYPE_CHECKING:
    from penstock.tracing import Tracer

PAUSED = Failure(Code.UNAVAILABLE, "the engine is paused: requests wait until it is resumed")
MIN_BODY_SIZE, BYTES_PER_TOKEN = 2**20, 64
"""Default of ``max_body_size``: ``BYTES_PER_TOKEN`` (JSON syntax included) times the longest context length in tokens,
at least ``MIN_BODY_SIZE``."""
IMAGE_BODY_SIZE = 2**26
"""The least default for requests with images, which they bring as base64."""
MIN_BODY_MEMORY = 3 * 2**26
"""Default of ``max_body_memory``, or three times ``max_body_size``."""
RECEIVED = "penstock.body"
"""Key of a request's scope: its body, which has been received."""
T = TypeVar("T")


class ServedModel:
    """A model that this API process serves, as handlers see it.

    Args:
        entry: what the supervisor has announced of it.
        admission: context manager that counts a request among those of all models.
        parser: parses requests of all models.
    """

    def __init__(
        self,
        entry: ModelEntry,
        gateway: Gateway,
        options: ServerOptions,
        metrics: ModelMetrics,
        admission: Callable[[], AbstractContextManager[None]],
        parser: BodyParser,
    ) -> None:
        self.names = entry.names
        """Names that clients use for it; the first is in its answers."""
        self.name = entry.name
        self.kserve = entry.kserve
        """Models of the KServe v2 protocol over it: name → kind."""
        self.configuration = entry.configuration
        self.gateway = gateway
        self.options = options
        self.metrics = metrics
        self.parser = parser
        self._admission = admission
        self._open = 0
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()

    @property
    def all_names(self) -> list[str]:
        """Its names, and those of its LoRA adapters."""
        return [*self.names, *self.gateway.engine_pool.adapters]

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
        return name in self.all_names

    def adapter_of(self, name: str | None) -> str:
        """The LoRA adapter that a request's ``model`` names; empty for the base model.

        Raises ``PenstockError`` (``not_found``) for an unknown model.
        """
        if name is None or name in self.names:
            return ""
        if name in self.gateway.engine_pool.adapters:
            return name
        if name in ANY_MODEL:
            return ""
        known = ", ".join(self.all_names)
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


class ServedModels:
    """Served models by name. A request that names no model gets the first one."""

    def __init__(self, options: ServerOptions, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self.options = options
        self.metrics = metrics
        self.tracer = tracer
        """Makes spans of requests; None for no traces."""
        self.created = int(time.time())
        self._models: tuple[ModelEntry, ...] = ()
        self._received = False
        self._services: dict[str, ServedModel] = {}
        self._serving: tuple[ServedModel, ...] = ()
        """The values of ``_services``, in the order of the list."""
        self._open = 0
        self._max_sizes = MIN_BODY_SIZE, MIN_BODY_SIZE
        self.body_memory = BodyMemory(options.max_body_memory or max(MIN_BODY_MEMORY, 3 * options.max_body_size))
        self._parser = BodyParser()
        self.ready_hooks: list[Callable[[], Awaitable[None]]] = []
        """Called when the engine of a model has become ready."""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._serving)

    @property
    def models(self) -> tuple[ModelEntry, ...]:
        """All models of the server, loaded or not."""
        return self._models

    def set_models(self, models: tuple[ModelEntry, ...]) -> None:
        """Replace the list of models, as the supervisor announced it."""
        self._models, self._received = models, True
        self._order()

    def add(self, model: ModelEntry, gateway: Gateway) -> ServedModel:
        """Start serving a model."""
        metrics = self.metrics.of(model.name)
        service = ServedModel(model, gateway, self.options, metrics, self._admit, self._parser)
        self._services[model.name] = service
        self._order()
        return service

    def remove(self, name: str) -> ServedModel:
        """Stop serving a model; open requests go on."""
        service = self._services.pop(name)
        self._order()
        return service

    def _order(self) -> None:
        self._serving = tuple(self._services[model.name] for model in self._models if model.name in self._services)

    def find(self, name: str | None = None) -> ServedModel:
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
        known = ", ".join(each for service in self for each in service.all_names)
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

    def find_or_first(self, name: str | None) -> ServedModel:
        """As ``find``, but returns the first model for an unknown name, for dialects that ignore ``model``."""
        return next((service for service in self if name is not None and service.has(name)), None) or self._first()

    def check_expected(self, model: ModelEntry | None) -> None:
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
        return {service.name: (service.gateway.engine_pool.stats, service.configuration.engine) for service in self}

    @property
    def max_body_size(self) -> int:
        """Largest body of a request that may have images, bytes. While no engine is ready, the last one that depended
        on an engine, so that a request is read, and its error has its dialect's format."""
        return self._max_body_sizes()[1]

    @property
    def max_text_size(self) -> int:
        """Largest body of any other request, bytes; likewise."""
        return self._max_body_sizes()[0]

    def _max_body_sizes(self) -> tuple[int, int]:
        """``max_text_size`` and ``max_body_size``."""
        if self.options.max_body_size:
            return self.options.max_body_size, self.options.max_body_size
        engines = [service.gateway.engine_pool for service in self]
        lengths = [engine.engine.max_model_len for engine in engines if engine.engine]
        if lengths:
            text_size = max(MIN_BODY_SIZE, *(BYTES_PER_TOKEN * length for length in lengths))
            sees_images = any(service.sees_images for service in self)
            self._max_sizes = text_size, max(text_size, IMAGE_BODY_SIZE) if sees_images else text_size
        return self._max_sizes

    async def read(self, request: Request, parse: Callable[[bytes], T], max_size: int | None = None) -> T:
        """Read a request's JSON body and run ``parse`` on it, in a thread where the body is large.

        Args:
            max_size: bytes; ``max_text_size`` by default.

        Raises ``PenstockError``: as ``receive`` and ``parse``; ``invalid`` where the body has too many elements.
        """
        body = await self.receive(request, self.max_text_size if max_size is None else max_size)
        return await self.parse(record_of(request.scope), len(body), lambda: (check_elements(body), parse(body)))

    async def receive(self, request: Request, max_size: int) -> bytes:
        """A request's body, whose memory it holds until it ends; one that ``RECEIVED`` has is not read again.

        Raises ``PenstockError``: ``too_large``, ``timeout`` where the client stops sending, ``cancelled`` where it
        disconnects, ``overloaded`` where there is no memory for it, ``unavailable`` for a large body where no engine
        has told how large it may be.
        """
        body: bytes | None = request.scope.pop(RECEIVED, None)
        if body is None:
            try:
                body = await receive_body(request, max_size, self.options.client_timeout, self.body_memory)
            except PenstockError as error:
                if error.failure.code is Code.TOO_LARGE and not self.options.max_body_size:
                    self.check_alive()
                raise
        return body

    async def reserve(self, record: RequestRecord, size: int) -> None:
        """Wait until there is memory for ``size`` bytes that a request takes besides its body, and hold it until it
        ends. Raises ``PenstockError`` (``overloaded``) as ``BodyMemory.reserve``."""
        if size <= UNCOUNTED_SIZE:
            return
        more = await self.body_memory.reserve(record.sender, size, self.options.client_timeout)
        record.memory = record.memory.joined(more) if record.memory else more

    async def parse(self, record: RequestRecord, size: int, work: Callable[[], tuple[int, T]]) -> T:
        """The second result of ``work`` on a body of ``size`` bytes, in a thread where it is large.

        Args:
            work: returns how many bytes of memory its result takes, too.

        Raises ``PenstockError``: as ``work``; ``overloaded`` where there is no memory for the result.
        """
        taken, result = await self._parser.parse(record.sender, size, work)
        if taken > UNCOUNTED_SIZE:
            record.memory = record.memory or Reservation(self.body_memory, record.sender)
            record.memory.resize(max(record.memory.size, taken), parsed=True)
        return result

    def _first(self) -> ServedModel:
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
