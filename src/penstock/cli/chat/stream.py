"""Iteration over an async generator from a thread without an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

from anyio.from_thread import BlockingPortal

T = TypeVar("T")


class Stream(Generic[T]):
    """Iterates over an async generator that runs in the portal's event loop; exiting the context manager cancels it."""

    def __init__(self, portal: BlockingPortal, items: AsyncGenerator[T, None]) -> None:
        self._queue: SimpleQueue[tuple[T] | None] = SimpleQueue()
        self._producer = portal.start_task_soon(self._run, items)
        self._producer.add_done_callback(lambda _: self._queue.put(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __iter__(self) -> Iterator[T]:
        """Yield the generator's items, and raise its exceptions."""
        while (item := self._queue.get()) is not None:
            yield item[0]
        if not self.stopped:
            self._producer.result()

    def stop(self) -> None:
        """Cancel the generator. Can be called in any thread and in signal handlers."""
        self._producer.cancel()

    @property
    def stopped(self) -> bool:
        """True if the generator was cancelled."""
        return self._producer.cancelled()

    async def _run(self, items: AsyncGenerator[T, None]) -> None:
        async with aclosing(items):
            async for item in items:
                self._queue.put((item,))
