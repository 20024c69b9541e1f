"""Format of a dialect's errors: response body, end of a stream, status."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec

from penstock.core import Failure

from .status import STATUS


def rename_field(failure: Failure, names: Mapping[str, str]) -> Failure:
    """Replace the internal name of the failure's field, also at the beginning of its message.

    Args:
        names: the dialect's field names by internal name.
    """
    field = failure.field
    dialect_field = names.get(field, field)
    message = failure.message
    if message.startswith(f"{field}: "):
        message = dialect_field + message[len(field) :]
    return msgspec.structs.replace(failure, field=dialect_field, message=message)


class ErrorFormat(ABC):
    """Formats a dialect's errors.

    Args:
        names: the dialect's field names by internal name.
    """

    dialect = "openai"
    """Name of the dialect, for the log."""
    stream_start, stream_end = b"data: ", b"\n\n"
    """Bytes around the error in a stream."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}

    @abstractmethod
    def document(self, failure: Failure) -> object:
        """Return the JSON document of an error. ``failure.field`` already has the dialect's name."""

    def error(self, failure: Failure) -> bytes:
        """Return the body of an error response."""
        return msgspec.json.encode(self.document(rename_field(failure, self._names)))

    def stream_error(self, failure: Failure) -> bytes:
        """Return the final bytes of a stream that fails after it has started."""
        return self.stream_start + self.error(failure) + self.stream_end

    def status(self, failure: Failure) -> int:
        """Return the HTTP status of an error response."""
        return STATUS[failure.code]
