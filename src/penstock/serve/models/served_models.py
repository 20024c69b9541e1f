"""The models served by an API process, by name."""

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
from .keep_alive import KeepAlive
from .messages import ANY_MODEL, ModelEntry

if TYPE_CHECKING:
    from penstock.tracing import Tracer

PAUSED = Failure(Code.UNAVAILABLE, "the engine is paused: requests wait until it is resumed")
MIN_BODY_SIZE, BYTES_PER_TOKEN = 2**20, 64
"""Default of ``max_body_size`` in bytes: ``BYTES_PER_TOKEN`` (including JSON syntax) times the longest context length,
at least ``MIN_BODY_SIZE``."""
IMAGE_BODY_SIZE = 2**26
"""Minimum of the default ``max_body_size`` for models with image input (base64), in bytes."""
MIN_BODY_MEMORY = 3 * 2**26
"""Minimum of the default of ``max_body_memory`` in bytes; the default is three times ``max_body_size``."""
RECEIVED = "penstock.body"
"""Key in a request's scope; the value is the body, if it was received to select the dialect."""
LOAD_INTERVAL = 0.5
"""Seconds between checks for a model that is being loaded."""
T = TypeVar("T")


class ServedModel:
    """A model served by this API process.

    Args:
        entry: announcement of the supervisor.
        admission: context manager that counts a request of any model.
        parser: body parser shared by all models.
        keep_alive: time for which the idle model stays loaded.
    """

    def __init__(
        self,
        entry: ModelEntry,
        gateway: Gateway,
        options: ServerOptions,
        metrics: ModelMetrics,
        admission: Callable[[], AbstractContextManager[None]],
        parser: BodyParser,
        keep_alive: KeepAlive,
    ) -> None:
        self.keep_alive = keep_alive
        self.names = entry.names
        """Names of the model; the first is used in answers."""
        self.name = entry.name
        self.kserve = entry.kserve
        """Kind of each KServe v2 model based on this model, by name."""
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
        """Names of the model and of its LoRA adapters."""
        return [*self.names, *self.gateway.engine_pool.adapters]

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables read by the model's chat templates, with or without tools."""
        self.gateway.input_processor.check_chats()
        tokenizer = self.gateway.input_processor.tokenizer
        return tokenizer.template.variables | tokenizer.template_for(tools=True).variables

    @property
    def sees_images(self) -> bool:
        """True if prompts may contain images."""
        return self.gateway.input_processor.media.sees_images

    @property
    def timeout(self) -> float | None:
        """Maximum duration of a request in seconds; None: no limit."""
        return self.options.request_timeout or None

    def has(self, name: str) -> bool:
        """True if ``name`` is a name of the model or of one of its LoRA adapters."""
        return name in self.all_names

    def adapter_of(self, name: str | None) -> str:
        """Return the LoRA adapter named by a request's ``model``; empty for the base model.

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
        """Count a request as open. Raises ``PenstockError`` (``overloaded``) at the limit ``max_concurrency``."""
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


async def when_loaded(find: Callable[[], ServedModel]) -> ServedModel:
    """Call ``find`` until its model is loaded. Raises ``PenstockError`` of ``find`` except ``unavailable``."""
    while True:
        try:
            return find()
        except PenstockError as error:
            if error.failure.code is not Code.UNAVAILABLE:
                raise
        await asyncio.sleep(LOAD_INTERVAL)


class ServedModels:
    """Served models by name. A request without a model uses the first model."""

    def __init__(self, options: ServerOptions, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self.options = options
        self.metrics = metrics
        self.tracer = tracer
        """Tracer for the spans of requests; None: tracing is off."""
        self.created = int(time.time())
        self._models: tuple[ModelEntry, ...] = ()
        self._received = False
        self._services: dict[str, ServedModel] = {}
        self._serving: tuple[ServedModel, ...] = ()
        """Values of ``_services``, in the order of ``_models``."""
        self._open = 0
        self._max_sizes = MIN_BODY_SIZE, MIN_BODY_SIZE
        self.body_memory = BodyMemory(options.max_body_memory or max(MIN_BODY_MEMORY, 3 * options.max_body_size))
        self._parser = BodyParser()
        self.ready_hooks: list[Callable[[], Awaitable[None]]] = []
        """Functions called when the engine of a model becomes ready."""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._serving)

    def listed(self) -> tuple[ServedModel, ...]:
        """All served models. Raises ``PenstockError`` (``unavailable``) before the first model is known."""
        if not self._serving:
            self.check_alive()
        return self._serving

    @property
    def models(self) -> tuple[ModelEntry, ...]:
        """All models of the server, loaded or not."""
        return self._models

    def set_models(self, models: tuple[ModelEntry, ...]) -> None:
        """Replace the list of models by the supervisor's announcement."""
        self._models, self._received = models, True
        self._order()

    def add(self, model: ModelEntry, gateway: Gateway, keep_alive: KeepAlive) -> ServedModel:
        """Start serving a model."""
        metrics = self.metrics.of(model.name)
        service = ServedModel(model, gateway, self.options, metrics, self._admit, self._parser, keep_alive)
        self._services[model.name] = service
        self._order()
        return service

    def remove(self, name: str) -> ServedModel:
        """Stop serving a model; open requests continue."""
        service = self._services.pop(name)
        self._order()
        return service

    def _order(self) -> None:
        self._serving = tuple(self._services[model.name] for model in self._models if model.name in self._services)

    def find(self, name: str | None = None) -> ServedModel:
        """Find the model for the field ``model`` of a request: the name of a model or adapter; None: the first model.

        Raises ``PenstockError``: ``not_found`` if the model is not served; ``unavailable`` if it is being loaded, or no
        model is loaded.
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
            self.check_alive()  # the name may be an adapter of a model that is being loaded
        else:
            self.check_expected(model)
            message = f"the model {name!r} is not served: {model.reason}; available: {known or 'none'}"
            raise PenstockError(Code.NOT_FOUND, message, "model")
        raise PenstockError(Code.NOT_FOUND, f"the model {name!r} does not exist; available: {known or 'none'}", "model")

    def has(self, name: object) -> bool:
        """True if a name is that of a served model or adapter, or one of ``ANY_MODEL``."""
        return isinstance(name, str) and (name in ANY_MODEL or any(service.has(name) for service in self))

    def find_or_first(self, name: str | None) -> ServedModel:
        """Like ``find``, but return the first model for an unknown name, for dialects that ignore ``model``."""
        return next((service for service in self if name is not None and service.has(name)), None) or self._first()

    def check_expected(self, model: ModelEntry | None) -> None:
        """Raise ``PenstockError`` (``unavailable``) if the model is being loaded, or no models were announced yet."""
        if not self._received or (model and model.expected):
            raise PenstockError.of(STARTING)

    def check_alive(self) -> None:
        """Raise ``PenstockError`` (``unavailable``) unless every required model has a live engine, possibly asleep."""
        if not self._received or any(model.required and model.name not in self._services for model in self._models):
            raise PenstockError.of(STARTING)
        for service in self:
            service.gateway.engine_pool.check_alive()

    def check_health(self) -> None:
        """As ``check_alive``; also raise ``PenstockError`` (``unavailable``) if the last load of a model that was
        unloaded while it was idle has failed."""
        self.check_alive()
        for model in self._models:
            if model.load_failure:
                raise PenstockError.of(model.load_failure)

    def check(self) -> None:
        """Raise ``PenstockError`` (``unavailable``) unless every required model has a ready, unpaused engine, or was
        unloaded because it was idle and its last load has not failed."""
        self.check_health()
        for service in self:
            if service.gateway.engine_pool.is_held:
                continue
            service.gateway.engine_pool.require_engine()
            if all(state.is_paused for state in service.gateway.engine_pool.states):
                raise PenstockError.of(PAUSED)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of all engines. A model has several if results of its engines may differ."""
        return sorted({one for service in self for one in service.gateway.engine_pool.fingerprints})

    @property
    def num_open_requests(self) -> int:
        """Number of open requests of all models."""
        return self._open

    @property
    def engine_stats(self) -> EngineStats:
        """Latest statistics and options of each model's engine, by model name."""
        return {service.name: (service.gateway.engine_pool.stats, service.configuration.engine) for service in self}

    @property
    def max_body_size(self) -> int:
        """Maximum body size of a request that may contain images, in bytes.

        While no engine is ready, the last value is kept, so that a request can be read and its error has the format of
        its dialect.
        """
        return self._max_body_sizes()[1]

    @property
    def max_text_size(self) -> int:
        """Maximum body size of a request without images, in bytes; see ``max_body_size``."""
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
        """Read a request's JSON body and run ``parse`` on it, in a thread if the body is large.

        Args:
            max_size: maximum size in bytes; None: ``max_text_size``.

        Raises ``PenstockError``: as ``receive`` and ``parse``; ``invalid`` if the body has too many elements.
        """
        body = await self.receive(request, self.max_text_size if max_size is None else max_size)
        return await self.parse(record_of(request.scope), len(body), lambda: (check_elements(body), parse(body)))

    async def receive(self, request: Request, max_size: int) -> bytes:
        """Receive a request's body. Its memory is reserved until the request ends. A body in ``RECEIVED`` is reused.

        Raises ``PenstockError``: ``too_large``; ``timeout`` if the client stops sending; ``cancelled`` if it
        disconnects; ``overloaded`` if memory is exhausted; ``unavailable`` for a large body while no engine is ready.
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
        """Reserve ``size`` bytes in addition to the request's body, until the request ends. Raises ``PenstockError``
        (``overloaded``) as ``BodyMemory.reserve``."""
        if size <= UNCOUNTED_SIZE:
            return
        more = await self.body_memory.reserve(record.sender, size, self.options.client_timeout)
        record.memory = record.memory.joined(more) if record.memory else more

    async def parse(self, record: RequestRecord, size: int, work: Callable[[], tuple[int, T]]) -> T:
        """Run ``work`` on a body of ``size`` bytes, in a thread if it is large, and return its second result.

        Args:
            work: returns the memory of its result in bytes, and the result.

        Raises ``PenstockError``: as ``work``; ``overloaded`` if there is no memory for the result.
        """
        taken, result = await self._parser.parse(record.sender, size, work)
        if taken > UNCOUNTED_SIZE:
            record.memory = record.memory or Reservation(self.body_memory, record.sender)
            record.memory.resize(max(record.memory.size, taken), parsed=True)
        return result

    def _first(self) -> ServedModel:
        if (first := next(iter(self), None)) is None:
            self.check_alive()
            raise PenstockError(Code.UNAVAILABLE, "no model is loaded: load a model first")
        return first

    @contextmanager
    def _admit(self) -> Iterator[None]:
        """Count a request. Raises ``PenstockError`` (``overloaded``) if ``max_concurrency`` requests are open."""
        maximum = self.options.max_concurrency
        if self._open >= maximum:
            message = f"{maximum} requests are open; try again later (max_concurrency)"
            raise PenstockError(Code.OVERLOADED, message, "max_concurrency", maximum)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
