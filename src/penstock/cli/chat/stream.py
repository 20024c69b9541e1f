"""An async generator, iterated over in a thread without an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

from anyio.from_thread import BlockingPortal

T = TypeVar("T")


class Stream(Generic[T]):
    """Iterates over an async generator that runs in the portal's event loop; leaving the context manager cancels it."""

    def __init__(self, portal: BlockingPortal, pieces: AsyncGenerator[T, None]) -> None:
        self._queue: SimpleQueue[tuple[T] | None] = SimpleQueue()
        self._producer = portal.start_task_soon(self._run, pieces)
        self._producer.add_done_callback(lambda _: self._queue.put(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __iter__(self) -> Iterator[T]:
        """Raises what the generator raises."""
        while (piece := self._queue.get()) is not None:
            yield piece[0]
        if not self.stopped:
            self._producer.result()

    def stop(self) -> None:
        """Cancel the generator; may be called in any thread or signal handler."""
        self._producer.cancel()

    @property
    def stopped(self) -> bool:
        """Whether the generation was interrupted."""
        return self._producer.cancelled()

    async def _run(self, pieces: AsyncGenerator[T, None]) -> None:
        async with aclosing(pieces):
            async for piece in pieces:
                self._queue.put((piece,))
