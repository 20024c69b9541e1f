"""Pages of lists. Does not import SQLAlchemy."""

from __future__ import annotations

from typing import Any, NamedTuple


class PageQuery(NamedTuple):
    """The requested part of a list."""

    limit: int
    """Maximum number of entries."""
    after: str = ""
    """Id of the entry before the page; empty for the first page."""
    ascending: bool = False
    """True: oldest entries first; False: newest first."""


class Page(NamedTuple):
    """A page of a list."""

    entries: list[Any]
    has_more: bool
    """True if there are further entries."""
