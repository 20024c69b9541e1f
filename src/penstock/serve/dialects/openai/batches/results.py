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
BEGINNING = f'{{"id":"{PREFIX}'.encode()
"""Prefix of the ids of results."""

AGAIN = (408, 429, 500, 503, 504)
"""Statuses of results that a later run tries again; the last result of a line counts."""

_line = msgspec.json.Decoder(BatchLine).decode
_result = msgspec.json.Decoder(BatchResult).decode
_encode = msgspec.json.Encoder().encode


def requests(path: Path) -> Iterator[BatchLine | BatchError]:
    """The lines of an input file, but for blank ones; an error for each that is no request, or repeats a custom_id."""
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
                message = f"line {number}: custom_id {line.custom_id!r} is that of line {first}"
                yield BatchError(code="duplicate_custom_id", message=bounded(message), line=number)


class Results:
    """The output file: existing results, and those that are appended. A context manager, which locks the file.

    Results are appended and flushed one by one. An incomplete last line, of a process that was killed, is dropped.

    Args:
        private: only the server's user may read the file.

    Raises ``PenstockError`` (``invalid``) where the file cannot be written, is locked, or holds something else.
    """

    def __init__(self, path: Path, private: bool = False) -> None:
        self._path = path
        self._private = private
        self._good: dict[str, bool] = {}
        self._errors: set[int] = set()

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
            raise invalid("output_file", f"{self._path} is being written by another run") from error
        except BaseException:
            self._file.close()
            raise
        return self

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Close the file at the end of a block, where it was entered before it."""
        with ExitStack() as stack:
            stack.push(self)
            yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # the error was reported by `add`
            self._file.close()

    def find(self, line: BatchLine | BatchError) -> bool | None:
        """Whether a line's result is successful; None where it has none."""
        if isinstance(line, BatchLine):
            return self._good.get(line.custom_id)
        return False if line.line in self._errors else None

    def add(self, custom_id: str | None, response: BatchResponse | None, error: BatchError | None) -> None:
        """Raises ``PenstockError`` (``invalid``) where it cannot be written."""
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
                    raise invalid("output_file", f"{self._path} holds something else than results of a batch")
                self._file.truncate(complete_bytes)
                break
            try:
                self._note(_result(text))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                message = f"{self._path} holds something else than results of a batch: line {number}: {error}"
                raise invalid("output_file", message) from error
            complete_bytes += len(text)

    def _note(self, result: BatchResult) -> None:
        if result.custom_id is not None and result.response is not None and result.response.status_code in AGAIN:
            self._good.pop(result.custom_id, None)
        elif result.custom_id is not None:
            self._good[result.custom_id] = result.response is not None and result.response.status_code == 200
        if result.error is not None:
            self._errors.add(result.error.line)


def open_private(path: Path, mode: str) -> BinaryIO:
    """Open a file to write; one that is made is readable by this user only."""
    return cast(BinaryIO, open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600)))


@dataclass(frozen=True)
class BatchState:
    """The lines of a batch by state."""

    left: int
    skipped: int
    """Lines that have a result already, failed ones included."""
    failed: int
    """Skipped lines whose result is an error."""


def survey(lines: Iterable[BatchLine | BatchError], results: Results) -> BatchState:
    """Read all lines and compare them with the results."""
    counts = Counter(map(results.find, lines))
    return BatchState(left=counts[None], skipped=counts[True] + counts[False], failed=counts[False])


def check_input(path: Path) -> None:
    """Raises ``PenstockError`` (``invalid``) unless it is a file, which can be read more than once."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise invalid("input_file", f"{path} cannot be read: {error.strerror}") from error
    if not path.is_file():
        raise invalid("input_file", f"{path} is not a file; a pipe could not be counted first")
