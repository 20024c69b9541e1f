"""Pages of lists: which entries of a list a client asks for. Imports no database."""

from __future__ import annotations

from typing import Any, NamedTuple


class PageQuery(NamedTuple):
    """The part of a list that is asked for."""

    limit: int
    """Entries at most."""
    after: str = ""
    """Id of the entry after which the page begins; empty for the first page."""
    ascending: bool = False
    """Oldest entries first."""


class Page(NamedTuple):
    """Entries of a list."""

    entries: list[Any]
    has_more: bool
    """Whether there are entries after these."""
