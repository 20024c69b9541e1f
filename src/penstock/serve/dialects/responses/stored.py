"""Stored responses: their conversations, and those that are computed in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.core import Failure, PenstockError
from penstock.engine.service.client import STOPPING
from penstock.serve.http.reply import INTERNAL, RequestLimiter

from .handler import Document, ResponseHandler
from .requests import CountTokensRequest, Item

if TYPE_CHECKING:  # what it imports may not be installed
    from penstock.serve.storage.responses import ResponseStore

BEAT_INTERVAL = 2.0
"""Seconds between two signs of life of a background response."""
logger = logging.getLogger(__name__)
T = TypeVar("T", bound=CountTokensRequest)


def input_items(request: CountTokensRequest, name: str) -> list[Document]:
    """The items of a request's own input, with ids."""
    given = request.input
    if isinstance(given, str):
        parts = [{"type": "input_text", "text": given}]
        given = [msgspec.convert({"role": "user", "content": parts}, Item)]
    items: list[Document] = msgspec.to_builtins(given)
    return [
        {"id": f"in_{name}_{i}", **{key: value for key, value in item.items() if value is not None}}
        for i, item in enumerate(items)
    ]


async def with_conversation(request: T, store: ResponseStore, owner: str) -> T:
    """The request with the conversation of ``previous_response_id`` before its input. Raises as
    ``ResponseStore.conversation``."""
    if request.previous_response_id is None:
        return request
    before = await store.conversation(owner, request.previous_response_id)
    own = input_items(request, "")
    return msgspec.structs.replace(request, input=msgspec.convert([*before, *own], list[Item]))


class Background:
    """The responses that this process computes in the background."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(
        self, service: RequestLimiter, handler: ResponseHandler, keep: Callable[[Document], Awaitable[None]]
    ) -> Document:
        """Store a response that is queued, and begin to compute it."""
        queued = handler.pending("queued")
        await keep(queued)
        name = queued["id"]
        self._tasks[name] = asyncio.create_task(self._run(name, service, handler, keep))
        self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name, None))
        return queued

    def cancel(self, name: str) -> None:
        """Stop computing a response, if this process does; others find it out within ``BEAT_INTERVAL``."""
        if task := self._tasks.get(name):
            task.cancel()

    async def _run(
        self,
        name: str,
        service: RequestLimiter,
        handler: ResponseHandler,
        keep: Callable[[Document], Awaitable[None]],
    ) -> None:
        async def finish() -> None:
            with service.admit():
                await keep(handler.pending("in_progress"))
                document = await handler.document()
            if await self._store.beat(name):
                await keep(document)

        work = asyncio.create_task(finish())
        try:
            while not work.done():
                await asyncio.wait([work], timeout=BEAT_INTERVAL)
                if not work.done() and not await self._store.beat(name):
                    work.cancel()
            await work
        except PenstockError as error:
            await self._fail(name, handler, keep, error.failure)
        except asyncio.CancelledError:
            work.cancel()
            await self._fail(name, handler, keep, STOPPING)
        except Exception:
            logger.exception("a background response failed")
            await self._fail(name, handler, keep, INTERNAL)

    async def _fail(
        self, name: str, handler: ResponseHandler, keep: Callable[[Document], Awaitable[None]], failure: Failure
    ) -> None:
        """Store that it failed, unless it was cancelled or deleted."""
        if await self._store.beat(name):
            await keep(handler.failed(failure))
