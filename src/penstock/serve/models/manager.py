"""An API process's line to the supervisor: which models there are, and clients' wishes for others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import sys
from collections.abc import Coroutine, Mapping
from typing import Any, BinaryIO

import msgspec

from penstock.core import Code, Failure, PenstockError
from penstock.frontend.gateway import Gateway
from penstock.frontend.input_processor import Preparer

from .messages import Done, Left, Load, Met, Models, ServedModel, Unfit, Unload, decode_to_worker, line
from .registry import Services
from .service import Service

logger = logging.getLogger(__name__)

LONGEST_LINE = 2**26
"""Bytes."""
UNLOADED = Failure(Code.UNAVAILABLE, "the model has been unloaded")


class Keeper:
    """Has the models that the supervisor tells of served, and no others.

    Args:
        report: where the supervisor listens.
    """

    def __init__(self, services: Services, report: BinaryIO) -> None:
        self._services = services
        self._report = report
        self._gateways: dict[str, Gateway] = {}
        """By the address of the engine."""
        self._numbers = itertools.count()
        self._wanted: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, heard: bytes) -> None:
        """Do what the supervisor says, until it says no more; ``heard`` was read already."""
        reader = asyncio.StreamReader(LONGEST_LINE)
        reader.feed_data(heard)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while said := await reader.readline():
            match decode_to_worker(said):
                case Models(models):
                    await self._follow({model.engine: model for model in models if model.engine}, models)
                    gc.enable()
                    self._tell(Met())
                case Done(number, failure):
                    wanted = self._wanted.pop(number)
                    if not wanted.done():
                        wanted.set_exception(PenstockError.of(failure)) if failure else wanted.set_result(None)

    async def load(self, name: str) -> None:
        """Returns once every API process serves the model. Raises ``PenstockError`` where it cannot be."""
        await self._ask(Load(next(self._numbers), name))

    async def unload(self, name: str) -> None:
        """Returns once the model's engine has ended. Raises ``PenstockError`` where it cannot be."""
        await self._ask(Unload(next(self._numbers), name))

    def refuse(self, failure: Failure) -> None:
        """Take no requests any more, and end what is open."""
        for gateway in self._gateways.values():
            gateway.engine.refuse(failure)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(gateway.close() for gateway in self._gateways.values()))

    @property
    def explicit(self) -> bool:
        """Whether clients may have models loaded and unloaded."""
        return self._services.options.model_control_mode == "explicit"

    def check(self) -> None:
        """Raises ``PenstockError`` (``unsupported``) where models stay as they are."""
        if not self.explicit:
            words = "models are loaded at the start and stay; --model-control-mode explicit lets them come and go"
            raise PenstockError(Code.UNSUPPORTED, words, "model_control_mode")

    async def _ask(self, wish: Load | Unload) -> None:
        self.check()
        done = self._wanted[wish.number] = asyncio.get_running_loop().create_future()
        self._tell(wish)
        await done

    async def _follow(self, running: Mapping[str, ServedModel], models: tuple[ServedModel, ...]) -> None:
        self._services.know(models)
        serving = {service.gateway: service for service in self._services}
        for address, gateway in list(self._gateways.items()):
            model = running.get(address)
            if gateway in serving and (model is None or model.leaving):
                service = self._services.remove(serving[gateway].name)
                if model:
                    self._spawn(self._leave(service, model))
            if model is None:
                del self._gateways[address]
                self._spawn(gateway.close())
        for address, model in running.items():
            if address not in self._gateways:
                if model.leaving:
                    self._tell(Left(address))
                else:
                    await self._serve(model)

    async def _serve(self, model: ServedModel) -> None:
        try:
            preparer = await asyncio.to_thread(_prepared, model)
        except PenstockError as error:
            self._tell(Unfit(model.engine, error.failure))
            return
        except Exception as error:  # what is wrong with a file may be anything, and is no reason to serve no others
            logger.exception("the text of %s cannot be served", model.name)
            words = f"{model.configuration.engine.model}: its tokenizer or chat template cannot be used: {error!r}"
            self._tell(Unfit(model.engine, Failure(Code.INVALID, words, "model")))
            return
        gateway = self._gateways[model.engine] = Gateway(model.engine, preparer)
        if model.wanted:
            self._services.add(model, gateway)
            gc.freeze()  # what is there now stays, and need not be looked through again and again
        self._spawn(self._meet(gateway, model))

    async def _meet(self, gateway: Gateway, model: ServedModel) -> None:
        with contextlib.suppress(PenstockError):  # it ended before it was ready
            await gateway.engine.ready()
            if self._gateways.get(model.engine) is not gateway:
                return
            if not model.wanted:
                self._services.add(model, gateway)
            self._tell(Met(model.engine))

    async def _leave(self, service: Service, model: ServedModel) -> None:
        """Let what is open come to its end, for as long as it may take."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.idle.wait(), model.configuration.engine.drain_timeout)
        service.gateway.engine.refuse(UNLOADED)
        self._tell(Left(model.engine))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._report.write(line(message))
            self._report.flush()


def _prepared(model: ServedModel) -> Preparer:
    """Raises ``PenstockError`` where there is no tokenizer, or its chat template cannot be used."""
    # What is there from the start is read here, before anything streams.
    engine = model.configuration.engine
    preparer = Preparer(engine.model, model.configuration.model, engine.max_output_len, isolated=not model.wanted)
    preparer.tokenizer.check_template()
    _ = preparer.tokenizer.vocabulary  # made now, while the engine reads its weights, not when the first request comes
    _ = preparer.vocabulary()
    return preparer
