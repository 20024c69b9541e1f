"""Files that are read in a thread while steps are computed, and used between two steps."""

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
    """One thread that reads, one file after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "read-weights")
        self._reads: list[_Read] = []

    def submit(self, read: Callable[[], T], use: Callable[[T], Any]) -> Future[Any]:
        """Read in the thread.

        Args:
            use: called by ``poll`` with what was read.

        Returns the future of what ``use`` returns, or of the error of either.
        """
        answer: Future[Any] = Future()
        self._reads.append(_Read(self._thread.submit(read), use, answer))
        return answer

    @property
    def pending(self) -> list[Future[Any]]:
        """Futures of what is being read; once one is done, ``poll`` has to be called."""
        return [read.contents for read in self._reads]

    def poll(self) -> None:
        """Use what has been read since the last call."""
        for read in [read for read in self._reads if read.contents.done()]:
            self._reads.remove(read)
            try:
                read.answer.set_result(read.use(read.contents.result()))
            except Exception as error:
                read.answer.set_exception(error)
