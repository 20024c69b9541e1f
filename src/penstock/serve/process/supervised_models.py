"""The supervisor's models and their engine processes, started and stopped as models are loaded and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TypeVar

import msgspec

from penstock.config.options import Configuration
from penstock.config.profiles import load
from penstock.core import Code, Failure, PenstockError
from penstock.engine.service.control import ModelAction, ModelControl, RestartEngines, starts_engines
from penstock.engine.service.engine_processes import EngineProcesses
from penstock.engine.service.instance import Instance
from penstock.engine.service.launcher import EXIT_TIMEOUT
from penstock.engine.service.messages import Ready

from ..models.messages import ModelEntry, Models
from .api_processes import ApiProcesses
from .instances import Instances

logger = logging.getLogger("penstock")

AGREE_TIMEOUT = 5.0
"""Maximum seconds to wait for the answers of API processes before an idle model is unloaded."""

T = TypeVar("T")


class SupervisedModels:
    """The models by name, and the engine processes of the loaded models.

    Args:
        models: all models, loaded or not.
        fetch: downloads the model if needed, which may take long; returns the configuration with a local folder as
            ``engine.model``.
        api_processes: the API processes; every change is sent to them.
        instances: remote instances that answer requests instead of local engines (``--role router``), or compute
            prompts for the local engines.
    """

    def __init__(
        self,
        models: Sequence[ModelEntry],
        fetch: Callable[[Configuration], Configuration],
        api_processes: ApiProcesses,
        instances: Instances | None = None,
    ) -> None:
        self._keep_alive = models[0].configuration.server.model_idle_timeout or None
        """Keep-alive time of a newly loaded model (``ModelEntry.keep_alive``)."""
        models = [msgspec.structs.replace(model, keep_alive=self._keep_alive) for model in models]
        self._models = {model.name: model for model in models}
        self._fetch = fetch
        self._api_processes = api_processes
        self._instances = instances
        self._running: dict[str, EngineProcesses | Instances] = {}
        self._controls: dict[str, ModelControl] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._locks = {model.name: asyncio.Lock() for model in models}
        self._wanted = {model.name: asyncio.Event() for model in models}
        """Set by ``wake``, which ends an attempt to unload the model."""
        self._starting = asyncio.Lock()
        """Held while an engine starts: its KV cache is sized by the memory that is free at that time."""
        self._closing = False
        self.lost = asyncio.Event()
        """Set when the last engine has exceeded its restart limit."""
        api_processes.set_models(Models(tuple(models)))

    @property
    def serving(self) -> list[ModelEntry]:
        return [model for model in self._models.values() if model.engine and not model.draining]

    @property
    def states(self) -> dict[str, str]:
        """State of each model by name, for ``ServerRecord``."""
        return {name: self._state(name) for name in self._models}

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``; empty without a running engine."""
        if not self.reports:
            return ""
        return "cpu" if all(report.host_bytes for report in self.reports) else "cuda"

    @property
    def reports(self) -> list[Ready]:
        """Reports of the engines running on this host."""
        return [report for engine in self._running.values() for report in engine.reports]

    async def load(self, name: str) -> Ready | None:
        """Load a model. Returns when all API processes serve it; None: it was loaded already.

        Raises ``PenstockError`` if the model does not exist, or cannot be loaded.
        """
        self._check(name)
        async with self._locks[name]:
            if self._models[name].engine:
                await self._wake(name)
                return None
            configuration = await _in_daemon_thread(lambda: self._fetch(self._models[name].configuration))
            async with self._starting:
                ready = await self._start(name, configuration)
            profile = load(configuration.server.compat)
            if profile and (ready_message := profile.ready_message(ready.num_blocks, configuration.engine)):
                logger.info(ready_message)
            return ready

    async def unload(self, name: str) -> None:
        """Unload a model: drain its requests, then stop its engine. Does nothing if the model is not loaded.

        Raises ``PenstockError`` if the model does not exist.
        """
        self._check(name)
        async with self._locks[name]:
            if name not in self._running:
                return
            engine = self._running[name]
            self._api_processes.forget_drained(self._models[name].engine)
            stopping = {"required": False, "draining": True, "reason": "it is being unloaded"}
            self._update(name, **stopping, unloaded=False, load_failure=None)
            with contextlib.suppress(TimeoutError):  # an API process may hang
                async with asyncio.timeout(self._models[name].configuration.engine.drain_timeout + EXIT_TIMEOUT):
                    await self._api_processes.wait_drained(self._models[name].engine)
            await self._end(name, engine)
            self._update(name, engines=(), draining=False, reason="unloaded")

    async def unload_idle(self, name: str) -> None:
        """End the engine processes of a model until ``wake`` if no API process has used it for its keep-alive time.

        API processes hold new requests from the first step on, so none is lost.
        """
        async with self._locks[name]:
            engine, control, model = self._running.get(name), self._controls.get(name), self._models[name]
            if control is None or not isinstance(engine, EngineProcesses) or self._closing or model.unloaded:
                return
            if control.is_busy or not engine.all_run or not model.may_unload:
                return
            wanted = self._wanted[name]
            wanted.clear()
            self._api_processes.forget_drained(model.engine)
            self._update(name, unloaded=True)
            if not await self._agree(model.engine, wanted) or not engine.all_run:
                self._update(name, unloaded=False)
                return
            await engine.unload()
            logger.info("unloaded %s, which was idle; the next request loads it", name)

    async def _agree(self, engine: str, wanted: asyncio.Event) -> bool:
        """Wait until no API process has an open request. Returns False if one wants the model, or does not answer."""
        tasks = [asyncio.create_task(each) for each in (self._api_processes.wait_drained(engine), wanted.wait())]
        try:
            await asyncio.wait(tasks, timeout=AGREE_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].done() and not wanted.is_set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def wake(self, name: str) -> None:
        """Load a model that was unloaded because it was idle. Raises ``PenstockError`` if it cannot be loaded."""
        self._wanted[name].set()
        async with self._locks[name]:
            await self._wake(name)

    async def _wake(self, name: str) -> None:
        engine = self._running.get(name)
        if not self._models[name].unloaded or not isinstance(engine, EngineProcesses):
            return
        started = time.monotonic()
        try:
            async with self._starting:
                await engine.load()
        except PenstockError as error:
            logger.error("%s could not be loaded for a request: %s", name, error)
            message = f"the model {name!r} could not be loaded; the server's log has the reason"
            failure = Failure(Code.UNAVAILABLE, message)
            self._update(name, load_failure=failure)
            raise PenstockError.of(failure) from error
        self._update(name, unloaded=False, load_failure=None, keep_alive=self._keep_alive)
        logger.info("loaded %s for a request", name, extra={"fields": {"seconds": time.monotonic() - started}})

    def set_keep_alive(self, name: str, seconds: float | None) -> None:
        """Change the keep-alive time of a model until it is unloaded."""
        if self._models[name].keep_alive != seconds and self._models[name].may_unload:
            self._update(name, keep_alive=seconds)

    async def operate(self, name: str, operation: ModelAction) -> None:
        """Execute an operation on the engines of a model. Raises ``PenstockError`` if the operation fails."""
        self._check(name)
        if (control := self._controls.get(name)) is None:
            message = "a router has no engine: send the request to the instances"
            if name not in self._running:
                message = f"the model {name!r} is not loaded: load it first"
            raise PenstockError(Code.UNSUPPORTED, message)
        with control.busy():  # from before the model is loaded on, so that it is not unloaded again in between
            if self._models[name].unloaded:
                await self.wake(name)
            if not starts_engines(operation):
                await control.execute(operation)
                return
            async with self._locks[name], self._starting:
                if self._controls.get(name) is not control or self._closing:
                    raise PenstockError(Code.UNAVAILABLE, f"the model {name!r} is being unloaded")
                await control.execute(operation)

    def stop_restarting(self) -> None:
        """Load no more models and restart no engines: the server is about to stop."""
        self._closing = True
        for engine in self._running.values():
            if isinstance(engine, EngineProcesses):
                engine.stop_restarting()

    async def close(self) -> None:
        self._closing = True
        await asyncio.gather(*(control.close() for control in self._controls.values()))
        await asyncio.gather(*(engine.close() for engine in self._running.values()))
        for task in self._watching.values():
            task.cancel()

    def kill(self) -> None:
        """Kill the engines immediately."""
        for engine in self._running.values():
            engine.kill()

    async def _start(self, name: str, configuration: Configuration) -> Ready:
        if self._closing:
            raise PenstockError(Code.UNAVAILABLE, "the server is stopping")
        engine: EngineProcesses | Instances
        if self._instances and configuration.engine.role == "router":
            engine = self._instances
        else:
            engine = EngineProcesses(configuration.engine, configuration.log)
        self._running[name] = engine
        self._update(name, configuration=configuration, engines=engine.addresses)
        starting = asyncio.create_task(engine.start())
        try:
            ready, _ = await asyncio.gather(starting, self._api_processes.wait_ready(engine.addresses[0]))
        except BaseException as error:  # also raised if an API process cannot load the tokenizer
            starting.cancel()
            await asyncio.gather(starting, engine.close(), return_exceptions=True)
            del self._running[name]
            self._update(name, engines=(), reason=str(error) or "not loaded")
            raise
        self._update(name, required=True)
        if isinstance(engine, EngineProcesses):
            self._controls[name] = ModelControl(engine, partial(self._announce_engines, name, engine))
        if self._instances and engine is not self._instances:
            self._instances.start_discovery(ready)
        self._watching[name] = asyncio.create_task(self._watch(name, engine))
        return ready

    async def _announce_engines(self, name: str, engine: EngineProcesses) -> None:
        """Send changed engine addresses to the API processes, and wait until all of them use the engines."""
        self._update(name, engines=engine.addresses)
        for address in engine.addresses:
            await self._api_processes.wait_ready(address)

    async def restart(self) -> None:
        """Replace the engine processes of all models, one after the other. Errors are logged."""
        for name in list(self._controls):
            if self._models[name].unloaded:
                continue  # its next engine process runs the installed version
            try:
                await self.operate(name, RestartEngines())
            except PenstockError as error:
                logger.error("the engine of %s was not restarted: %s", name, error)
            except Exception:
                logger.exception("the engine of %s was not restarted", name)

    def set_instances(self, instances: tuple[Instance, ...]) -> None:
        """Set the instances of the first model."""
        self._update(next(iter(self._models)), instances=instances)

    async def _watch(self, name: str, engine: EngineProcesses | Instances) -> None:
        await engine.watch()
        async with self._locks[name]:
            if engine.closing or self._closing:
                return
            logger.error("%s is no longer served: its engine has died too often", name)
            await self._end(name, engine)
            self._update(name, required=False, engines=(), reason="its engine has died too often")
        if not self._running:
            self.lost.set()

    async def _end(self, name: str, engine: EngineProcesses | Instances) -> None:
        if control := self._controls.pop(name, None):
            await control.close()
        await engine.close()
        del self._running[name], self._watching[name]

    def _state(self, name: str) -> str:
        model, engine = self._models[name], self._running.get(name)
        if engine is None:
            return "starting" if model.required else "unloaded"
        if model.draining:
            return "unloading"
        if model.unloaded:
            return "unloaded"
        if name not in self._watching or not (engine.reports or isinstance(engine, Instances)):
            return "starting"
        control = self._controls.get(name)
        return "sleeping" if control and control.is_asleep else "ready"

    def _check(self, name: str) -> None:
        if name not in self._models:
            message = f"the model {name!r} does not exist; known are {', '.join(self._models)}"
            raise PenstockError(Code.NOT_FOUND, message, "model_name")

    def _update(self, name: str, **changes: object) -> None:
        """Change a model's state and send it to the API processes."""
        self._models[name] = msgspec.structs.replace(self._models[name], **changes)
        self._api_processes.set_models(Models(tuple(self._models.values())))


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that does not keep the process alive: a download may take an hour."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)
