"""Pagination of lists as in OpenAI's API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal
from penstock.serve.storage.pages import Page, PageQuery

DEFAULT_LISTED = 20
"""Default of the query parameter ``limit``."""


def page_query(raw_request: Request, maximum: int) -> PageQuery:
    """Read ``limit`` (1 to ``maximum``), ``after`` and ``order`` (default ``desc``) from a URL.

    Raises ``PenstockError`` (``invalid``) for an invalid ``limit``.
    """
    query = raw_request.query_params
    limit = read_decimal(query.get("limit", str(DEFAULT_LISTED)), maximum)
    if not limit:
        raise invalid("limit", f"must be 1 to {maximum}, is {query.get('limit', '')!r:.50}", maximum)
    return PageQuery(limit, query.get("after", ""), query.get("order") == "asc")


def page_document(page: Page) -> dict[str, Any]:
    """Format a page of objects with an ``id`` as a response."""
    ends = {"first_id": page.entries[0]["id"], "last_id": page.entries[-1]["id"]} if page.entries else {}
    return {"object": "list", "data": page.entries, "first_id": None, "last_id": None, "has_more": page.has_more} | ends
