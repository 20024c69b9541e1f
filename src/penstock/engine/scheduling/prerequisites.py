"""Prerequisites: futures that must be done before a request is queued, such as the compilation of its grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from penstock.core import Code, Failure, PenstockError

from ..sequence.sequence import Sequence


class Prerequisite(NamedTuple):
    """A future that must be done before a request is queued."""

    future: Future[Any]
    """The future, which requests may share. It is cancelled if all these requests end before it is done."""
    apply: Callable[[Sequence, Any], None]
    """Callback with a sequence of the request and the future's result."""
    every_sequence: bool = False
    """Call ``apply`` for every sequence of a resumed request; otherwise only for its first unfinished one."""


class Prerequisites:
    """Sequences that wait for prerequisites, in the order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[Sequence, list[Prerequisite]] = {}
        self._users: dict[Future[Any], int] = {}
        """Number of sequences that wait for each future."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    @property
    def futures(self) -> list[Future[Any]]:
        """Distinct futures for which sequences wait."""
        return list(self._users)

    def add(self, sequence: Sequence, prerequisites: list[Prerequisite]) -> None:
        """Add a sequence that needs all of ``prerequisites``."""
        self._waiting[sequence] = prerequisites
        for future, *_ in prerequisites:
            self._users[future] = self._users.get(future, 0) + 1

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence, and cancel its futures that no other sequence needs. Returns False if the sequence has no
        prerequisites."""
        prerequisites = self._waiting.pop(sequence, None)
        for future, *_ in prerequisites or ():
            self._users[future] -= 1
            if not self._users[future]:
                del self._users[future]
                future.cancel()
        return prerequisites is not None

    def apply_done(self) -> Iterator[tuple[Sequence, Failure | None]]:
        """Apply the results for sequences whose futures are all done. Yields each sequence, which the caller has to
        ``remove``, with the failure of a future or an ``apply``, or None."""
        if not any(future.done() for future in self._users):
            return
        for sequence, prerequisites in list(self._waiting.items()):
            if sequence in self._waiting and all(each.future.done() for each in prerequisites):
                yield sequence, _apply(sequence, prerequisites)


def _apply(sequence: Sequence, prerequisites: list[Prerequisite]) -> Failure | None:
    """Apply the results of all prerequisites. Returns the first failure, or None."""
    try:
        for future, apply, _ in prerequisites:
            apply(sequence, future.result())
    except PenstockError as error:
        return error.failure
    except Exception as error:
        return Failure(Code.INTERNAL, str(error))
    return None
