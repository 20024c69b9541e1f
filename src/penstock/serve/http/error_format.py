"""How a dialect says things. Which one is spoken is known once a request is read, and before that by its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from starlette.types import Scope

from penstock.core import Failure

from .request_record import record_of
from .status import STATUS


def renamed(failure: Failure, names: Mapping[str, str]) -> Failure:
    """The same with its field, at the beginning of its words, too, as a dialect calls it.

    Args:
        names: of fields, by the names under which others know them.
    """
    ours = failure.field
    theirs = names.get(ours, ours)
    words = failure.message
    if words.startswith(f"{ours}: "):
        words = theirs + words[len(ours) :]
    return msgspec.structs.replace(failure, field=theirs, message=words)


class Shape:
    """How a dialect says that something failed."""

    dialect = "openai"
    """Which one, for the log."""

    def error(self, failure: Failure) -> bytes:
        """The body of a response that failed."""
        raise NotImplementedError

    def late_error(self, failure: Failure) -> bytes:
        """The end of a stream that failed."""
        raise NotImplementedError

    def status(self, failure: Failure) -> int:
        """HTTP's number of a response that failed."""
        return STATUS[failure.code]


class Shapes:
    """Those of all dialects.

    Args:
        usual: where nothing else is known.
        by_path: for paths that begin like this, which one dialect has to itself.
        by_head: told by a request's path and headers, where they tell.
    """

    def __init__(
        self, usual: Shape, by_path: Mapping[str, Shape], by_head: Sequence[Callable[[Scope], Shape | None]] = ()
    ) -> None:
        self._usual = usual
        self._by_path = by_path
        self._by_head = by_head

    def of(self, scope: Scope) -> Shape:
        """What a request is to be told in."""
        if spoken := record_of(scope).shape:
            return spoken
        for told in self._by_head:
            if found := told(scope):
                return found
        return next((shape for path, shape in self._by_path.items() if scope["path"].startswith(path)), self._usual)
