"""The one error of all packages: its code, message, field and limit. Each dialect formats it in its own way."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec
from msgspec.structs import force_setattr


class Code(StrEnum):
    """Error codes."""

    INVALID = "invalid"  # a wrong value
    UNSUPPORTED = "unsupported"  # a valid request that this build or model does not support
    TOO_LARGE = "too_large"  # the body has too many bytes
    TOO_LONG = "too_long"  # the prompt has more tokens (value) than the context holds (limit)
    UNAUTHORIZED = "unauthorized"  # the API key is missing or wrong
    NOT_FOUND = "not_found"  # no model, adapter or request of that name
    NOT_ALLOWED = "not_allowed"  # the path exists, but not for this HTTP method
    OVERLOADED = "overloaded"  # the queue is full; a later attempt may succeed
    TIMEOUT = "timeout"  # the deadline has passed
    CANCELLED = "cancelled"  # by the client, or because it disconnected
    UNAVAILABLE = "unavailable"  # the engine is starting, stopping or was restarted
    INTERNAL = "internal"  # a bug


RETRYABLE = frozenset((Code.OVERLOADED, Code.UNAVAILABLE))
"""Codes after which the same request may succeed later."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as data.

    ``field`` is the offending field by its internal name (``top_p``), ``limit`` the bound that was exceeded, and
    ``value`` what exceeded it, for dialects that format both in their own words. Its texts can be encoded as UTF-8:
    unpaired surrogates, which they may quote of a request, are escaped.
    """

    code: Code
    message: str
    field: str = ""
    limit: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name in ("message", "field"):
            if not (text := getattr(self, name)).isascii():
                force_setattr(self, name, text.encode("utf-8", "backslashreplace").decode())

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE


class PenstockError(Exception):
    """Raised for requests, checkpoints and configurations that cannot be served; ``failure`` has the details."""

    def __init__(
        self, code: Code, message: str, field: str = "", limit: float | None = None, value: float | None = None
    ) -> None:
        self.failure = Failure(code, message, field, limit, value)
        super().__init__(self.failure.message)

    def __reduce__(self) -> tuple[Callable[[Failure], PenstockError], tuple[Failure]]:
        """Processes of an application send it to each other, as Ray's and multiprocessing's do."""
        return PenstockError.of, (self.failure,)

    @classmethod
    def of(cls, failure: Failure) -> PenstockError:
        return cls(failure.code, failure.message, failure.field, failure.limit, failure.value)


def invalid(field: str, message: str, limit: float | None = None) -> PenstockError:
    """The error for a wrong value."""
    return PenstockError(Code.INVALID, f"{field}: {message}", field, limit)


def too_long(field: str, message: str, tokens: int, maximum: int) -> PenstockError:
    """The error for a prompt that exceeds the context, or the server's limit."""
    return PenstockError(Code.TOO_LONG, f"{field}: {message}", field, maximum, tokens)
