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
        self.unfinished: list[_Read] = []
        """What is being read; once any of it is, ``poll`` has to be called."""

    def submit(self, read: Callable[[], T], use: Callable[[T], Any]) -> Future[Any]:
        """Read in the thread.

        Args:
            use: called by ``poll`` with what was read.

        Returns the future of what ``use`` returns, or of the error of either.
        """
        answer: Future[Any] = Future()
        self.unfinished.append(_Read(self._thread.submit(read), use, answer))
        return answer

    @property
    def pending(self) -> list[Future[Any]]:
        """Futures of what is being read."""
        return [read.contents for read in self.unfinished]

    def poll(self) -> None:
        """Use what has been read since the last call."""
        for read in [read for read in self.unfinished if read.contents.done()]:
            self.unfinished.remove(read)
            try:
                read.answer.set_result(read.use(read.contents.result()))
            except Exception as error:
                read.answer.set_exception(error)
