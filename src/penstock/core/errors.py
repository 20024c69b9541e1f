"""The error class of all packages: code, message, field and limit. Each API dialect has its own format for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum

import msgspec
from msgspec.structs import force_setattr


class Code(StrEnum):
    """Error codes."""

    INVALID = "invalid"  # a value is wrong
    UNSUPPORTED = "unsupported"  # a valid request that this build or model does not support
    TOO_LARGE = "too_large"  # the body has too many bytes
    TOO_LONG = "too_long"  # the prompt has more tokens (value) than the context holds (limit)
    UNAUTHORIZED = "unauthorized"  # the API key is missing or wrong
    NOT_FOUND = "not_found"  # no model, adapter or request has this name
    NOT_ALLOWED = "not_allowed"  # the path exists, but not for this HTTP method
    OVERLOADED = "overloaded"  # the queue is full; a later attempt may succeed
    TIMEOUT = "timeout"  # the deadline has passed
    CANCELLED = "cancelled"  # the client cancelled the request, or disconnected
    UNAVAILABLE = "unavailable"  # the engine is starting, stopping or was restarted
    INTERNAL = "internal"  # a bug of the server


RETRYABLE = frozenset((Code.OVERLOADED, Code.UNAVAILABLE))
"""Codes after which the same request may succeed later."""


MAX_MESSAGE = 480
"""Maximum characters of an error message. With the command's name as a prefix, a printed line has at most 500."""
MAX_FIELD = 120
"""Maximum characters of ``Failure.field``."""
MAX_WORD = 120
"""Maximum characters of a word in a shortened message."""
MAX_LONG_MESSAGE = 100 * MAX_MESSAGE
"""A message is cut to this number of characters before it is searched for secrets and long words."""
LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


_mask: Callable[[str], str] = str


def mask_long_messages(mask: Callable[[str], str]) -> None:
    """Set the function that masks secrets in a message before it is shortened: it would not find a cut secret."""
    global _mask
    _mask = mask


def bounded(message: str, maximum: int = MAX_MESSAGE) -> str:
    """Shorten a message to ``maximum`` characters: first its long words (quoted values), then its middle.

    The beginning, which says what is wrong, and the end, which says what to do, are kept.
    """
    if len(message) <= maximum:
        return message
    message = _mask(_shortened(message, MAX_LONG_MESSAGE))
    return _shortened(LONG_WORD.sub(lambda word: _shortened(word[0], MAX_WORD), message), maximum)


def _shortened(text: str, maximum: int) -> str:
    end = maximum // 3
    return text if len(text) <= maximum else f"{text[: maximum - end - 1]}…{text[-end:]}"


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Error data.

    ``message`` and ``field`` may quote a request: they are shortened (``bounded``), and unpaired surrogates are
    escaped, so that both can be encoded as UTF-8.
    """

    code: Code
    message: str
    """Text for the user, up to ``MAX_MESSAGE`` characters."""
    field: str = ""
    """Name of the invalid parameter (``top_p``)."""
    limit: float | None = None
    """Bound that was exceeded."""
    value: float | None = None
    """Value that exceeded the limit."""

    def __post_init__(self) -> None:
        for name, maximum in (("message", MAX_MESSAGE), ("field", MAX_FIELD)):
            if not (text := getattr(self, name)).isascii():
                text = text.encode("utf-8", "backslashreplace").decode()
            if (short := bounded(text, maximum)) is not getattr(self, name):
                force_setattr(self, name, short)

    @property
    def retryable(self) -> bool:
        """True if the same request may succeed later."""
        return self.code in RETRYABLE


CANCELLED = Failure(Code.CANCELLED, "the request was cancelled")
INTERNAL = Failure(Code.INTERNAL, "internal error; see the server's log")


class PenstockError(Exception):
    """A request, checkpoint or configuration cannot be served; ``failure`` has the details."""

    def __init__(
        self, code: Code, message: str, field: str = "", limit: float | None = None, value: float | None = None
    ) -> None:
        self.failure = Failure(code, message, field, limit, value)
        super().__init__(self.failure.message)

    def __reduce__(self) -> tuple[Callable[[Failure], PenstockError], tuple[Failure]]:
        """Support pickling, for Ray and multiprocessing."""
        return PenstockError.of, (self.failure,)

    @classmethod
    def of(cls, failure: Failure) -> PenstockError:
        """Exception for existing error data."""
        return cls(failure.code, failure.message, failure.field, failure.limit, failure.value)


def invalid(field: str, message: str, limit: float | None = None) -> PenstockError:
    """Error ``invalid`` for the parameter ``field``. ``message`` is a predicate: "must be at least 1, is 0"."""
    return PenstockError(Code.INVALID, f"{field}: {message}", field, limit)


def too_long(field: str, message: str, tokens: int, maximum: int) -> PenstockError:
    """Error ``too_long`` for a prompt of ``tokens`` tokens, with the maximum of the context or the server."""
    return PenstockError(Code.TOO_LONG, f"{field}: {message}", field, maximum, tokens)
