"""The engines of a server's models: a process each, started when its model is loaded, ended when it is unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import msgspec

from penstock.config.options import Configuration
from penstock.config.profiles import load
from penstock.core import Code, PenstockError
from penstock.engine.service.launcher import TO_END, EngineProcess
from penstock.engine.service.wire import Ready

from ..models.messages import Models, ServedModel
from .workers import Workers

logger = logging.getLogger("penstock")

T = TypeVar("T")


class Engines:
    """Models by name, and what runs of them.

    Args:
        models: all that there are.
        found: a configuration with its model's folder, which is fetched where it is not there; may take long.
        workers: told of every change.
    """

    def __init__(
        self, models: Sequence[ServedModel], found: Callable[[Configuration], Configuration], workers: Workers
    ) -> None:
        self._models = {model.name: model for model in models}
        self._found = found
        self._workers = workers
        self._running: dict[str, EngineProcess] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._one_by_one = {model.name: asyncio.Lock() for model in models}
        self._starting = asyncio.Lock()
        """Held while one starts: each takes its share of the memory that is free then."""
        self._closing = False
        self.lost = asyncio.Event()
        """Set when an engine has died too often, and there is no other."""
        workers.set_models(Models(tuple(models)))

    @property
    def serving(self) -> list[ServedModel]:
        return [model for model in self._models.values() if model.engine and not model.draining]

    async def load(self, name: str) -> Ready | None:
        """Returns once all API processes serve the model; nothing where it was loaded already.

        Raises ``PenstockError`` where there is no such model, or it cannot be loaded.
        """
        self._check(name)
        async with self._one_by_one[name]:
            if self._models[name].engine:
                return None
            configuration = await _unhurried(lambda: self._found(self._models[name].configuration))
            async with self._starting:
                ready = await self._start(name, configuration)
            profile = load(configuration.server.compat)
            if profile and (ready_message := profile.ready_message(ready.blocks, configuration.engine)):
                logger.info(ready_message)
            return ready

    async def unload(self, name: str) -> None:
        """Returns once its engine has ended, after what was open; nothing happens where it is not loaded.

        Raises ``PenstockError`` where there is no such model.
        """
        self._check(name)
        async with self._one_by_one[name]:
            if name not in self._running:
                return
            engine = self._running[name]
            self._tell(name, required=False, draining=True, reason="it is being unloaded")
            with contextlib.suppress(TimeoutError):  # a process that stands still is not waited for
                async with asyncio.timeout(self._models[name].configuration.engine.drain_timeout + TO_END):
                    await self._workers.wait_drained(engine.address)
            await engine.close()
            del self._running[name]
            self._tell(name, engine="", draining=False, reason="unloaded")

    async def close(self) -> None:
        self._closing = True
        await asyncio.gather(*(engine.close() for engine in self._running.values()))
        for task in self._watching.values():
            task.cancel()

    def kill(self) -> None:
        """End them at once."""
        for engine in self._running.values():
            engine.kill()

    async def _start(self, name: str, configuration: Configuration) -> Ready:
        if self._closing:
            raise PenstockError(Code.UNAVAILABLE, "the server is stopping")
        engine = self._running[name] = EngineProcess(configuration.engine, configuration.log)
        self._tell(name, configuration=configuration, engine=engine.address)
        starting = asyncio.create_task(engine.start())
        try:
            ready, _ = await asyncio.gather(starting, self._workers.wait_ready(engine.address))
        except BaseException as error:  # text that cannot be served ends an engine that could be
            starting.cancel()
            await asyncio.gather(starting, engine.close(), return_exceptions=True)
            del self._running[name]
            self._tell(name, engine="", reason=str(error) or "not loaded")
            raise
        self._tell(name, required=True)
        self._watching[name] = asyncio.create_task(self._watch(name, engine))
        return ready

    async def _watch(self, name: str, engine: EngineProcess) -> None:
        await engine.watch()
        async with self._one_by_one[name]:
            if engine.closing:
                return
            logger.error("%s is not served any more", name)
            await engine.close()
            del self._running[name]
            self._tell(name, required=False, engine="", reason="its engine has died too often")
        if not self._running:
            self.lost.set()

    def _check(self, name: str) -> None:
        if name not in self._models:
            raise PenstockError(Code.NOT_FOUND, f"there is no model {name!r} to load", "model_name")

    def _tell(self, name: str, **changes: object) -> None:
        self._models[name] = msgspec.structs.replace(self._models[name], **changes)
        self._workers.set_models(Models(tuple(self._models.values())))


async def _unhurried(work: Callable[[], T]) -> T:
    """Done in a thread that the server's end does not wait for: a download may take an hour."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)
