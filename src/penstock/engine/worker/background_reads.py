"""Reads files in a thread while steps are computed. ``poll``, called between two steps, uses their contents."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Read(NamedTuple):
    contents: Future[Any]
    use: Callable[[Any], Any]
    answer: Future[Any]


class BackgroundReads:
    """A thread that reads files, one read after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "read-weights")
        self.unfinished: list[_Read] = []
        """Reads whose results ``poll`` has not used yet."""

    def submit(self, read: Callable[[], T], use: Callable[[T], Any]) -> Future[Any]:
        """Queue a read.

        Args:
            read: called in the thread.
            use: called by ``poll`` with the result of ``read``.

        Returns a future with the result of ``use``, or the error of either function.
        """
        answer: Future[Any] = Future()
        self.unfinished.append(_Read(self._thread.submit(read), use, answer))
        return answer

    @property
    def pending(self) -> list[Future[Any]]:
        """Futures of the unfinished reads. Call ``poll`` when one is done."""
        return [read.contents for read in self.unfinished]

    def poll(self) -> None:
        """Use the results of reads that have ended since the last call."""
        for read in [read for read in self.unfinished if read.contents.done()]:
            self.unfinished.remove(read)
            try:
                read.answer.set_result(read.use(read.contents.result()))
            except Exception as error:
                read.answer.set_exception(error)
