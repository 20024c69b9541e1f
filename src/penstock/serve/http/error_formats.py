"""Which dialect's error format a request is answered in: its own once it is read, before that by path and headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.types import Scope

from .error_format import ErrorFormat
from .request_record import record_of


class ErrorFormats:
    """Those of all dialects.

    Args:
        usual: where nothing else is known.
        by_path: for paths that begin like this, which one dialect has to itself.
        by_head: told by a request's path and headers, where they tell.
    """

    def __init__(
        self,
        usual: ErrorFormat,
        by_path: Mapping[str, ErrorFormat],
        by_head: Sequence[Callable[[Scope], ErrorFormat | None]] = (),
    ) -> None:
        self._usual = usual
        self._by_path = by_path
        self._by_head = by_head

    def of(self, scope: Scope) -> ErrorFormat:
        """What a request is to be told in."""
        if spoken := record_of(scope).error_format:
            return spoken
        for told in self._by_head:
            if found := told(scope):
                return found
        return next(
            (error_format for path, error_format in self._by_path.items() if scope["path"].startswith(path)),
            self._usual,
        )
