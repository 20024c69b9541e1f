"""What requests wait for before they are queued: a grammar that is compiled, and whatever else comes as a future."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from penstock.core import Code, Failure, PenstockError

from ..sequence.sequence import Sequence


class Prerequisite(NamedTuple):
    """Something that a request needs before it can run."""

    future: Future[Any]
    """Requests may share it. It is cancelled when the last of them ends before it is done."""
    apply: Callable[[Sequence, Any], None]
    """Called with the request's first sequence and the result."""


class Prerequisites:
    """Sequences that wait for theirs, in the order of their arrival."""

    def __init__(self) -> None:
        self._missing: dict[Sequence, list[Prerequisite]] = {}
        self._users: dict[Future[Any], int] = {}

    def __len__(self) -> int:
        return len(self._missing)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._missing)

    @property
    def futures(self) -> list[Future[Any]]:
        """All that is waited for."""
        return list(self._users)

    def add(self, sequence: Sequence, missing: list[Prerequisite]) -> None:
        """A sequence waits for all of these."""
        self._missing[sequence] = missing
        for prerequisite in missing:
            self._users[prerequisite.future] = self._users.get(prerequisite.future, 0) + 1

    def remove(self, sequence: Sequence) -> bool:
        """A sequence waits no longer. Returns whether it did."""
        missing = self._missing.pop(sequence, None)
        for future, _ in missing or ():
            self._users[future] -= 1
            if not self._users[future]:
                del self._users[future]
                future.cancel()  # where it has not begun
        return missing is not None

    def ready(self) -> Iterator[tuple[Sequence, Failure | None]]:
        """Sequences whose futures are all done, with what was wrong; they are to be removed by the caller."""
        if not any(future.done() for future in self._users):
            return
        for sequence, missing in list(self._missing.items()):
            if all(future.done() for future, _ in missing):
                yield sequence, _apply(sequence, missing)


def _apply(sequence: Sequence, missing: list[Prerequisite]) -> Failure | None:
    try:
        for future, apply in missing:
            apply(sequence, future.result())
    except PenstockError as error:
        return error.failure
    except Exception as error:
        return Failure(Code.INTERNAL, str(error))
    return None
