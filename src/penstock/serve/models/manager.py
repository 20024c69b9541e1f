"""Connection of an API process to the supervisor: serves the announced models, and forwards operations."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from penstock.core import Code, Failure, PenstockError
from penstock.engine.executor.cluster_secret import read_secret
from penstock.engine.service.control import READY_TIMEOUT, ModelAction, starts_engines
from penstock.engine.service.pool import ResumePolicy
from penstock.frontend.gateway import Gateway
from penstock.frontend.input_processor import InputProcessor
from penstock.text.isolated_template import IsolatedTemplate

from .keep_alive import IdleRequests, KeepAlive
from .messages import (
    INSTANCES,
    Done,
    Drained,
    Failed,
    Idle,
    Load,
    ModelEntry,
    Models,
    Operate,
    Ready,
    Register,
    Request,
    SetKeepAlive,
    Unload,
    Wake,
    decode_to_api_process,
)
from .served_models import ServedModel, ServedModels

logger = logging.getLogger(__name__)

MAX_LINE_SIZE = 2**26
"""Maximum size of a message in bytes."""
UNLOADED = Failure(Code.UNAVAILABLE, "the model has been unloaded")


class ModelManager:
    """Serves the models that the supervisor announces.

    Args:
        send: sends a message to the supervisor.
        unloads: True if the supervisor unloads idle models.
    """

    def __init__(
        self, served_models: ServedModels, send: Callable[[msgspec.Struct], None], unloads: bool = True
    ) -> None:
        self._unloads = unloads
        self._served_models = served_models
        self._send = send
        self._gateways: dict[str, Gateway] = {}
        """Gateways of the loaded models, by name."""
        self._keep_alives: dict[str, KeepAlive] = {}
        """Keep-alive times of the loaded models, by name."""
        self._waking: set[str] = set()
        """Models that this process is asking the supervisor to load."""
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[None]] = {}
        """Unanswered requests to the supervisor, by number."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, buffered: bytes) -> None:
        """Handle the supervisor's messages until it closes the pipe.

        Args:
            buffered: bytes of standard input after the first message that were already read.
        """
        reader = asyncio.StreamReader(MAX_LINE_SIZE)
        reader.feed_data(buffered)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while message := await reader.readline():
            match decode_to_api_process(message):
                case Models(models):
                    await self.update(models)
                    gc.enable()
                    self._send(Ready())
                case Done(number, failure):
                    pending = self._pending.pop(number)
                    if not pending.done():
                        pending.set_exception(PenstockError.of(failure)) if failure else pending.set_result(None)

    async def load(self, name: str) -> None:
        """Load a model. Returns when every API process serves it. Raises ``PenstockError`` if it cannot be loaded."""
        self.check()
        await self._request(Load(next(self._numbers), name))

    async def unload(self, name: str) -> None:
        """Unload a model. Returns when its engine has exited. Raises ``PenstockError`` if it cannot be unloaded."""
        self.check()
        await self._request(Unload(next(self._numbers), name))

    async def operate(self, service: ServedModel, operation: ModelAction) -> None:
        """Execute an operation on the engines of a model. Returns when this process has received the new state. Raises
        ``PenstockError`` if the operation fails."""
        await self._request(Operate(next(self._numbers), service.name, operation))
        pool = service.gateway.engine_pool
        if starts_engines(operation):
            with contextlib.suppress(TimeoutError):  # an engine has died again
                await pool.connected(READY_TIMEOUT)
        await pool.synchronize()

    def refuse(self, failure: Failure) -> None:
        """Fail open requests with ``failure``, and reject new requests."""
        for gateway in self._gateways.values():
            gateway.engine_pool.stop_serving(failure)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for keep_alive in self._keep_alives.values():
            keep_alive.close()
        await asyncio.gather(*(gateway.close() for gateway in self._gateways.values()))

    @property
    def explicit(self) -> bool:
        """True if clients may load and unload models (``model_control_mode``)."""
        return self._served_models.options.model_control_mode == "explicit"

    def check(self) -> None:
        """Raise ``PenstockError`` (``unsupported``) if clients may not load and unload models."""
        if not self.explicit:
            message = "models cannot be loaded or unloaded at run time; --model-control-mode explicit allows it"
            raise PenstockError(Code.UNSUPPORTED, message, "model_control_mode")

    async def register(self, name: str, engines: tuple[str, ...], leaves: bool) -> None:
        """Register or deregister an instance at the supervisor."""
        await self._request(Register(next(self._numbers), name, engines, leaves))

    async def _request(self, request: Request) -> None:
        done = self._pending[request.number] = asyncio.get_running_loop().create_future()
        self._send(request)
        await done

    async def update(self, models: tuple[ModelEntry, ...]) -> None:
        """Serve the models that have engines, and stop serving all other models."""
        running: Mapping[str, ModelEntry] = {model.name: model for model in models if model.engine}
        self._served_models.set_models(models)
        serving = {service.gateway: service for service in self._served_models}
        for name, gateway in list(self._gateways.items()):
            model = running.get(name)
            if gateway in serving and (model is None or model.draining):
                service = self._served_models.remove(serving[gateway].name)
                if model:
                    self._spawn(self._drain(service, model))
            if model is None:
                del self._gateways[name]
                self._keep_alives.pop(name).close()
                self._spawn(gateway.close())
        for name, model in running.items():
            if name not in self._gateways:
                if model.draining:
                    self._send(Drained(model.engine))
                else:
                    await self._serve(model)
                continue
            pool = self._gateways[name].engine_pool
            if model.instances or INSTANCES in model.engines:
                pool.set_instances(model.instances)
            if pool.set_engines(_local_engines(model)):
                self._spawn(self._report_engines(self._gateways[name], model))
            self._follow_idleness(model)

    async def _serve(self, model: ModelEntry) -> None:
        try:
            input_processor = await asyncio.to_thread(_load_input_processor, model)
        except PenstockError as error:
            self._send(Failed(model.engine, error.failure))
            return
        except Exception as error:  # a broken tokenizer file can raise anything; other models must not be affected
            logger.exception("the tokenizer or chat template of %s cannot be used", model.name)
            message = f"{model.configuration.engine.model}: its tokenizer or chat template cannot be used: {error!r}"
            self._send(Failed(model.engine, Failure(Code.INVALID, message, "model")))
            return
        options = model.configuration
        routed = INSTANCES in model.engines or bool(options.server.prefill_instances)
        gateway = self._gateways[model.name] = Gateway(
            _local_engines(model),
            input_processor,
            options.engine.data_parallel_request_cost,
            options.server.pd_min_prefill_tokens,
            read_secret(options.engine.cluster_secret_file, make=True) if routed else b"",
            ResumePolicy.of(options.engine),
        )
        gateway.engine_pool.set_instances(model.instances)
        self._keep_alives[model.name] = self._keep_alive(gateway, model.name)
        self._follow_idleness(model)
        if model.required:
            self._add(model, gateway)
            gc.freeze()  # exclude long-lived objects from garbage collection
        self._spawn(self._announce(gateway, model))

    def _add(self, model: ModelEntry, gateway: Gateway) -> None:
        self._served_models.add(model, gateway, self._keep_alives[model.name])

    def _keep_alive(self, gateway: Gateway, name: str) -> KeepAlive:
        """Create the keep-alive time of a model, which sends its changes to the supervisor."""
        gateway.engine_pool.on_held = lambda: self._spawn(self._wake(name, gateway))
        requests = IdleRequests(
            report_idle=lambda: self._request(Idle(next(self._numbers), name)),
            change=lambda seconds: self._request(SetKeepAlive(next(self._numbers), name, seconds)),
            load=lambda: self._request(Wake(next(self._numbers), name)),
        )
        return KeepAlive(gateway.engine_pool, requests if self._unloads else None)

    def _follow_idleness(self, model: ModelEntry) -> None:
        """Hold the requests of a model that the supervisor unloads because it is idle, or send them again. Reports to
        the supervisor whether this process agrees."""
        gateway, keep_alive = self._gateways[model.name], self._keep_alives[model.name]
        pool, agrees = gateway.engine_pool, keep_alive.is_expired
        keep_alive.may_change = self._unloads and model.may_unload
        keep_alive.set(model.keep_alive)
        if model.unloaded == pool.is_held:
            return
        if not model.unloaded:
            self._spawn(self._release(gateway, keep_alive, model))
            return
        pool.hold(True)
        if agrees:
            self._send(Drained(model.engine))
        elif pool.is_idle:
            self._spawn(self._wake(model.name, gateway))

    async def _release(self, gateway: Gateway, keep_alive: KeepAlive, model: ModelEntry) -> None:
        """Send the held requests as soon as the engines are connected."""
        with contextlib.suppress(TimeoutError, PenstockError):
            await gateway.engine_pool.connected(READY_TIMEOUT)
        if self._gateways.get(model.name) is gateway:
            keep_alive.release()

    async def _wake(self, name: str, gateway: Gateway) -> None:
        """Have a model loaded for the requests that wait for it, and fail them if that fails."""
        if name in self._waking:
            return
        self._waking.add(name)
        try:
            await self._request(Wake(next(self._numbers), name))
        except PenstockError as error:
            gateway.engine_pool.fail_held(error.failure)
        finally:
            self._waking.discard(name)

    async def _announce(self, gateway: Gateway, model: ModelEntry) -> None:
        """Report to the supervisor when the first engine is ready."""
        with contextlib.suppress(PenstockError):  # the engine exited before it was ready
            await gateway.engine_pool.ready()
            if self._gateways.get(model.name) is not gateway:
                return
            self._keep_alives[model.name].touch()
            if not model.required:
                self._add(model, gateway)
            for hook in self._served_models.ready_hooks:
                await hook()
            self._send(Ready(model.engine))
            await self._report_engines(gateway, model)

    async def _report_engines(self, gateway: Gateway, model: ModelEntry) -> None:
        """Report to the supervisor when this process uses all engines of this server."""
        with contextlib.suppress(PenstockError):
            await gateway.engine_pool.connected()
            for address in model.engines:
                self._send(Ready(address))

    async def _drain(self, service: ServedModel, model: ModelEntry) -> None:
        """Wait up to ``drain_timeout`` for open requests, then fail those that are still open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(model.configuration.engine.drain_timeout):
                await service.idle.wait()
        service.gateway.engine_pool.stop_serving(UNLOADED)
        self._send(Drained(model.engine))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _local_engines(model: ModelEntry) -> list[str]:
    """Addresses of the engines on this host."""
    return [address for address in model.engines if address != INSTANCES]


def _load_input_processor(model: ModelEntry) -> InputProcessor:
    """Load tokenizer and chat template. Raises ``PenstockError`` if they are missing or cannot be used."""
    engine = model.configuration.engine
    # At startup the tokenizer is loaded in this process, as there are no streams yet; later in a separate process.
    processor = InputProcessor(
        engine.model, model.configuration.model, engine.max_output_len, isolated=not model.required
    )
    if processor.tokenizer.template_source is not None:
        template = processor.tokenizer.template
        _ = template.variables
        if isinstance(template, IsolatedTemplate):
            template.start()
    _ = processor.tokenizer.vocabulary  # compute it while the engine loads its weights, not at the first request
    _ = processor.vocabulary()
    return processor
