"""The one error that crosses every floor: what went wrong, where, and what would have been right.

Dialects render it in their own shape; the code decides their status numbers.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Code(StrEnum):
    """Kinds of failure, by who can do something about it."""

    INVALID = "invalid"  # the request is wrong; sending it again will not help
    UNSUPPORTED = "unsupported"  # the request is right, but this build or model cannot do it
    TOO_LARGE = "too_large"  # more bytes than are read
    TOO_LONG = "too_long"  # more tokens than the context holds: the failure's value, and its limit
    UNAUTHORIZED = "unauthorized"  # a key is missing or wrong
    NOT_FOUND = "not_found"  # a model, adapter or request of that name is not here
    NOT_ALLOWED = "not_allowed"  # the path is here, but not for this HTTP method
    OVERLOADED = "overloaded"  # the queue is full; later it may work
    TIMEOUT = "timeout"  # the deadline passed
    CANCELLED = "cancelled"  # the client asked for the end, or went away
    UNAVAILABLE = "unavailable"  # the engine is starting, stopping or was restarted
    INTERNAL = "internal"  # a fault of ours


RETRYABLE = frozenset((Code.OVERLOADED, Code.UNAVAILABLE))
"""Codes after which the same request may succeed."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client is told.

    ``field`` names the offending field as the engine knows it (``sampling.top_p``), ``limit`` the bound that was
    passed, where there is one, and ``value`` what passed it, where a dialect says both in its own words.
    """

    code: Code
    message: str
    field: str = ""
    limit: float | None = None
    value: float | None = None

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE


class PenstockError(Exception):
    """Raised wherever a request, a checkpoint or a configuration cannot be served; carries its ``Failure``."""

    def __init__(
        self, code: Code, message: str, field: str = "", limit: float | None = None, value: float | None = None
    ) -> None:
        super().__init__(message)
        self.failure = Failure(code, message, field, limit, value)

    @classmethod
    def of(cls, failure: Failure) -> PenstockError:
        return cls(failure.code, failure.message, failure.field, failure.limit, failure.value)


def invalid(field: str, message: str, limit: float | None = None) -> PenstockError:
    """The error for a value that the sender has to change."""
    return PenstockError(Code.INVALID, f"{field}: {message}", field, limit)


def too_long(field: str, message: str, tokens: int, most: int) -> PenstockError:
    """The error for a prompt that the context, or what the server takes of it, does not hold."""
    return PenstockError(Code.TOO_LONG, f"{field}: {message}", field, most, tokens)
