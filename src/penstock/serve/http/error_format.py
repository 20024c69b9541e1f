"""How a dialect formats errors: body, end of a stream, status."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.core import Failure

from .status import STATUS


def rename_field(failure: Failure, names: Mapping[str, str]) -> Failure:
    """The same with its field, at the beginning of its words, too, as a dialect calls it.

    Args:
        names: of fields, by the names under which others know them.
    """
    ours = failure.field
    theirs = names.get(ours, ours)
    words = failure.message
    if words.startswith(f"{ours}: "):
        words = theirs + words[len(ours) :]
    return msgspec.structs.replace(failure, field=theirs, message=words)


class ErrorFormat:
    """How a dialect says that something failed."""

    dialect = "openai"
    """Which one, for the log."""

    def error(self, failure: Failure) -> bytes:
        """The body of a response that failed."""
        raise NotImplementedError

    def stream_error(self, failure: Failure) -> bytes:
        """The end of a stream that failed."""
        raise NotImplementedError

    def status(self, failure: Failure) -> int:
        """HTTP's number of a response that failed."""
        return STATUS[failure.code]
