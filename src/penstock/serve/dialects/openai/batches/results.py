"""The input and output files of a batch."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast
from uuid import uuid4

import msgspec

from penstock.core.errors import bounded, invalid
from penstock.serve.dialects.openai.batch import BatchError, BatchLine, BatchResponse, BatchResult
from penstock.serve.http.body import JSON_ERRORS, json_problem, without_mark

PREFIX = "batch_req_"
"""Prefix of result ids."""
BEGINNING = f'{{"id":"{PREFIX}'.encode()
"""First bytes of every line of an output file."""

RETRIED_STATUSES = (408, 429, 500, 503, 504)
"""HTTP statuses of failed results that a later run retries. If a line has several results, the last one counts."""

_line = msgspec.json.Decoder(BatchLine).decode
_result = msgspec.json.Decoder(BatchResult).decode
_encode = msgspec.json.Encoder().encode


def requests(path: Path) -> Iterator[BatchLine | BatchError]:
    """Yield the requests of an input file, or an error for a line that is not a request or repeats a ``custom_id``."""
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = _line(without_mark(text))
            except JSON_ERRORS as error:
                message = bounded(f"line {number}: {json_problem(text, error)}")
                yield BatchError(code="invalid_line", message=message, line=number)
                continue
            first = seen.setdefault(line.custom_id, number)
            if first == number:
                yield line
            else:
                message = f"line {number}: custom_id {line.custom_id!r} is already used in line {first}"
                yield BatchError(code="duplicate_custom_id", message=bounded(message), line=number)


class Results:
    """The output file of a batch, as a context manager that locks the file and reads existing results.

    Results are appended and flushed one by one. An incomplete last line (of a killed process) is removed.

    Args:
        private: make a new file readable only by the user that runs the server.

    Raises ``PenstockError`` (``invalid``) if the file cannot be written, is locked, or has other contents.
    """

    def __init__(self, path: Path, private: bool = False) -> None:
        self._path = path
        self._private = private
        self._succeeded: dict[str, bool] = {}
        """custom_id → True if the result of the request is successful."""
        self._errors: set[int] = set()
        """Numbers of invalid input lines that have a result."""

    def __enter__(self) -> Self:
        if self._path.exists() and not self._path.is_file():
            raise invalid(
                "output_file", f"{self._path} is not a regular file, so an interrupted run could not be resumed"
            )
        try:
            self._file = open_private(self._path, "a+b") if self._private else self._path.open("a+b")
        except OSError as error:
            raise invalid("output_file", f"{self._path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read_existing()
        except BlockingIOError as error:
            self._file.close()
            message = f"{self._path} is being written by another run; wait until that run has ended"
            raise invalid("output_file", message) from error
        except BaseException:
            self._file.close()
            raise
        return self

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Close the file at the end of a ``with`` block. Call ``__enter__`` before."""
        with ExitStack() as stack:
            stack.push(self)
            yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # `add` has reported the error
            self._file.close()

    def find(self, line: BatchLine | BatchError) -> bool | None:
        """True if the result of a line is successful, False if it is an error, None if the line has no result."""
        if isinstance(line, BatchLine):
            return self._succeeded.get(line.custom_id)
        return False if line.line in self._errors else None

    def add(self, custom_id: str | None, response: BatchResponse | None, error: BatchError | None) -> None:
        """Append a result. Raises ``PenstockError`` (``invalid``) if it cannot be written."""
        result = BatchResult(id=PREFIX + uuid4().hex, custom_id=custom_id, response=response, error=error)
        try:
            self._file.write(_encode(result) + b"\n")
            self._file.flush()
        except OSError as failed:
            raise invalid("output_file", f"{self._path} cannot be written: {failed.strerror}") from failed

    def _read_existing(self) -> None:
        self._file.seek(0)
        complete_bytes = 0
        for number, text in enumerate(self._file, 1):
            if not text.endswith(b"\n"):
                if not BEGINNING.startswith(text[: len(BEGINNING)]):
                    message = f"{self._path} is not a file of batch results: line {number} does not begin with"
                    raise invalid("output_file", f"{message} {BEGINNING.decode()}; choose another file")
                self._file.truncate(complete_bytes)
                break
            try:
                self._note(_result(text))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                message = f"{self._path} is not a file of batch results: line {number}: {error}"
                raise invalid("output_file", message) from error
            complete_bytes += len(text)

    def _note(self, result: BatchResult) -> None:
        status = result.response.status_code if result.response else None
        if result.custom_id is not None and status in RETRIED_STATUSES:
            self._succeeded.pop(result.custom_id, None)
        elif result.custom_id is not None:
            self._succeeded[result.custom_id] = status == 200
        if result.error is not None:
            self._errors.add(result.error.line)


def open_private(path: Path, mode: str) -> BinaryIO:
    """Open a file for writing. A new file is readable only by the user of this process."""
    return cast(BinaryIO, open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600)))


@dataclass(frozen=True)
class BatchState:
    """Number of lines of a batch by state."""

    left: int
    """Lines without a result."""
    skipped: int
    """Lines that already have a result, including failed results."""
    failed: int
    """Skipped lines with a failed result."""


def survey(lines: Iterable[BatchLine | BatchError], results: Results) -> BatchState:
    """Count the lines without a result, with a result, and with a failed result."""
    counts = Counter(map(results.find, lines))
    return BatchState(left=counts[None], skipped=counts[True] + counts[False], failed=counts[False])


def check_input(path: Path) -> None:
    """Raise ``PenstockError`` (``invalid``) unless the path is a regular file (so that it can be read twice)."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise invalid("input_file", f"{path} cannot be read: {error.strerror}") from error
    if not path.is_file():
        raise invalid("input_file", f"{path} is not a regular file and cannot be read twice; copy it to a regular file")
