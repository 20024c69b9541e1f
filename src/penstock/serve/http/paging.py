"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal

DEFAULT_LISTED = 20
"""Entries of a page where ``limit`` is not given."""


def page(raw_request: Request, entries: list[dict[str, Any]], maximum: int) -> dict[str, Any]:
    """A page of a list by the URL's ``limit``, ``after`` and ``order`` (``desc`` by default).

    Args:
        entries: all of them with their ``id``, the newest first.
        maximum: of ``limit``.

    Raises ``PenstockError`` (``invalid``) for another ``limit``.
    """
    query = raw_request.query_params
    if query.get("order") == "asc":
        entries = entries[::-1]
    if after := query.get("after"):
        entries = entries[next((i + 1 for i, one in enumerate(entries) if one["id"] == after), len(entries)) :]
    limit = read_decimal(query.get("limit", str(DEFAULT_LISTED)), maximum)
    if not limit:
        raise invalid("limit", f"must be 1 to {maximum}", maximum)
    shown = entries[:limit]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, **ends, "has_more": len(entries) > len(shown)}
