"""The one error of all packages: its code, message, field and limit. Each dialect formats it in its own way."""

from __future__ import annotations

import re
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


MAX_MESSAGE = 480
"""Characters of an error message, so that no more than 500 are shown with the name of the command before it."""
MAX_FIELD = 120
"""Characters of the name of a field in an error."""
MAX_WORD = 120
"""Characters without a space in a message that is too long."""
MAX_LONG_MESSAGE = 100 * MAX_MESSAGE
"""Characters of a message that is too long of which secrets and long words are looked for."""
LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


_mask: Callable[[str], str] = str


def mask_long_messages(mask: Callable[[str], str]) -> None:
    """Set the function that masks secrets in long messages before they are cut, as parts are not found later."""
    global _mask
    _mask = mask


def bounded(message: str, maximum: int = MAX_MESSAGE) -> str:
    """A message of at most ``maximum`` characters: quoted values are shortened first, then its middle is left out.

    The beginning says what is wrong and where, and the end what to do.
    """
    if len(message) <= maximum:
        return message
    message = _mask(_shortened(message, MAX_LONG_MESSAGE))
    return _shortened(LONG_WORD.sub(lambda word: _shortened(word[0], MAX_WORD), message), maximum)


def _shortened(text: str, maximum: int) -> str:
    end = maximum // 3
    return text if len(text) <= maximum else f"{text[: maximum - end - 1]}…{text[-end:]}"


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as data.

    ``field`` is the offending field by its internal name (``top_p``), ``limit`` the bound that was exceeded, and
    ``value`` what exceeded it, for dialects that format both in their own words. Its texts can be encoded as UTF-8:
    unpaired surrogates, which they may quote of a request, are escaped. They are ``bounded``, as they may quote
    anything.
    """

    code: Code
    message: str
    field: str = ""
    limit: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, maximum in (("message", MAX_MESSAGE), ("field", MAX_FIELD)):
            if not (text := getattr(self, name)).isascii():
                text = text.encode("utf-8", "backslashreplace").decode()
            if (short := bounded(text, maximum)) is not getattr(self, name):
                force_setattr(self, name, short)

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE


CANCELLED = Failure(Code.CANCELLED, "the request was cancelled")


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
