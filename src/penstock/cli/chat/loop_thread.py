"""An event loop in a thread, which runs while the main thread waits for input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, with an async context manager that is entered in it.

    Args:
        context: entered in the loop when this is entered, and left with it. Its errors are raised here.
    """

    def __init__(self, context: AbstractAsyncContextManager[Any]) -> None:
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="background", daemon=True)
        self._entered: Future[None] = Future()

    def __enter__(self) -> Self:
        self._task = self._loop.create_task(self._run_context())
        self._thread.start()
        try:
            self._entered.result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def stream(self, pieces: AsyncGenerator[T, None]) -> Stream[T]:
        """Iterate in this thread over an async generator that runs in the loop."""
        return Stream(self._loop, pieces)

    async def _run_context(self) -> None:
        try:
            async with self._context:
                self._entered.set_result(None)
                await asyncio.Event().wait()  # until it is cancelled
        except BaseException as error:
            if self._entered.done():
                raise
            self._entered.set_exception(error)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _stop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


class Stream(Generic[T]):
    """Iterates over an async generator in the loop's thread; leaving the context manager cancels it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pieces: AsyncGenerator[T, None]) -> None:
        self._queue: SimpleQueue[tuple[T] | None] = SimpleQueue()
        self._producer = asyncio.run_coroutine_threadsafe(self._run(pieces), loop)
        self._producer.add_done_callback(lambda _: self._queue.put(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
