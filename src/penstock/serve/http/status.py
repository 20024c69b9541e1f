"""HTTP statuses and headers for error codes."""

from __future__ import annotations

from penstock.core import Code, Failure

STATUS = {
    Code.INVALID: 400,
    Code.UNSUPPORTED: 400,
    Code.UNAUTHORIZED: 401,
    Code.NOT_FOUND: 404,
    Code.NOT_ALLOWED: 405,
    Code.TIMEOUT: 408,
    Code.TOO_LARGE: 413,
    Code.TOO_LONG: 400,
    Code.OVERLOADED: 429,
    Code.CANCELLED: 499,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
}
RETRY_AFTER = "1"
"""Seconds after which a client may retry."""


def headers(failure: Failure) -> dict[str, str]:
    if failure.retryable:
        return {"retry-after": RETRY_AFTER}
    return {"x-should-retry": "false"} if failure.code is Code.TIMEOUT else {}  # OpenAI's client would retry a 408
