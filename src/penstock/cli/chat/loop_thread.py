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
    """The loop and what lives in it.

    Args:
        life: entered when this is entered, and left with it. What entering raises is raised here.
    """

    def __init__(self, life: AbstractAsyncContextManager[Any]) -> None:
        self._life = life
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="background", daemon=True)
        self._begun: Future[None] = Future()

    def __enter__(self) -> Self:
        self._living = self._loop.create_task(self._live())
        self._thread.start()
        try:
            self._begun.result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def stream(self, pieces: AsyncGenerator[T, None]) -> Stream[T]:
        """What a generator yields in the loop."""
        return Stream(self._loop, pieces)

    async def _live(self) -> None:
        try:
            async with self._life:
                self._begun.set_result(None)
                await asyncio.Event().wait()  # until it is cancelled
        except BaseException as error:
            if self._begun.done():
                raise
            self._begun.set_exception(error)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._living)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _end(self) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._living.cancel)
        self._thread.join()


class Stream(Generic[T]):
    """Pieces as they come from the loop. Leaving ends what makes them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pieces: AsyncGenerator[T, None]) -> None:
        self._news: SimpleQueue[tuple[T] | None] = SimpleQueue()
        self._pump = asyncio.run_coroutine_threadsafe(self._run(pieces), loop)
        self._pump.add_done_callback(lambda _: self._news.put(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __iter__(self) -> Iterator[T]:
        """Raises what the generator raises."""
        while (piece := self._news.get()) is not None:
            yield piece[0]
        if not self.stopped:
            self._pump.result()

    def stop(self) -> None:
        """End it now, from whatever thread or signal handler."""
        self._pump.cancel()

    @property
    def stopped(self) -> bool:
        """Whether it was stopped before its end."""
        return self._pump.cancelled()

    async def _run(self, pieces: AsyncGenerator[T, None]) -> None:
        async with aclosing(pieces):
            async for piece in pieces:
                self._news.put((piece,))
