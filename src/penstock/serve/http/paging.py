"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal
from penstock.serve.storage.pages import Page, PageQuery

DEFAULT_LISTED = 20
"""Entries of a page where ``limit`` is not given."""


def page_query(raw_request: Request, maximum: int) -> PageQuery:
    """The page that a URL's ``limit``, ``after`` and ``order`` (``desc`` by default) ask for.

    Args:
        maximum: of ``limit``.

    Raises ``PenstockError`` (``invalid``) for another ``limit``.
    """
    query = raw_request.query_params
    limit = read_decimal(query.get("limit", str(DEFAULT_LISTED)), maximum)
    if not limit:
        raise invalid("limit", f"must be 1 to {maximum}", maximum)
    return PageQuery(limit, query.get("after", ""), query.get("order") == "asc")


def page_document(page: Page) -> dict[str, Any]:
    """The response with a page, whose entries are objects with an ``id``."""
    ends = {"first_id": page.entries[0]["id"], "last_id": page.entries[-1]["id"]} if page.entries else {}
    return {"object": "list", "data": page.entries, "first_id": None, "last_id": None, "has_more": page.has_more} | ends
