"""Selects the error format of a request: its dialect's once it is parsed, before that by path and headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.types import Scope

from .error_format import ErrorFormat
from .request_record import record_of


class ErrorFormats:
    """The error formats of all dialects.

    Args:
        default: the format where nothing else applies.
        by_head: functions that return the format for a request's path and headers, or None.
    """

    def __init__(self, default: ErrorFormat, by_head: Sequence[Callable[[Scope], ErrorFormat | None]] = ()) -> None:
        self.default = default
        self._by_head = by_head
        self._by_prefix: dict[str, ErrorFormat] = {}
        self._by_path: dict[str, ErrorFormat] = {}

    def add(self, error_format: ErrorFormat, *paths: str) -> None:
        """Use a format for the paths that begin with one of ``paths``; the longest counts."""
        self._by_prefix |= dict.fromkeys(paths, error_format)

    def add_exact(self, error_format: ErrorFormat, path: str) -> None:
        """Use a format for one path."""
        self._by_path[path] = error_format

    def of(self, scope: Scope) -> ErrorFormat:
        """The format for a request: its dialect's where that is known, else by headers, else by path."""
        if (known := record_of(scope).error_format) is not None:
            return known
        for by_head in self._by_head:
            if (recognized := by_head(scope)) is not None:
                return recognized
        path = scope["path"]
        if exact := self._by_path.get(path):
            return exact
        longest = max((prefix for prefix in self._by_prefix if path.startswith(prefix)), key=len, default="")
        return self._by_prefix.get(longest, self.default)
