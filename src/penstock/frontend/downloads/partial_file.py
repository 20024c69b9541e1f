"""A file that is being fetched: which of its bytes are there survives any end of the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from threading import Lock

from .remote import RemoteFile

SUFFIX, JOURNAL = ".part", ".ranges"
Range = tuple[int, int]
"""First byte, and the one after the last."""


class PartialFile:
    """Bytes of a file that arrive in any order, and beside it a journal of the ranges that are there.

    A range enters the journal after its bytes are on the disk, so that the journal is never ahead of them, also where
    the machine loses power. A journal of another version of the file is discarded with its bytes.

    Args:
        path: of the bytes, which have the suffix ``.part``.
    """

    def __init__(self, path: Path, file: RemoteFile) -> None:
        self.path = path
        self.size = file.size
        self._journal = path.with_name(path.name + JOURNAL)
        self._header = f"{file.size} {file.identity}\n"
        self._lock = Lock()
        self._ranges = _read_journal(self._journal, self._header) if path.exists() else []

    @property
    def num_bytes(self) -> int:
        """Bytes that are there."""
        return sum(end - start for start, end in self._ranges)

    @property
    def room_needed(self) -> int:
        """Bytes of the disk that the file does not take yet."""
        try:
            taken = self.path.stat().st_blocks * 512
        except OSError:
            taken = 0
        return max(self.size - taken, 0)

    def missing(self) -> list[Range]:
        """The ranges that are not there."""
        gaps, place = [], 0
        for start, end in [*self._ranges, (self.size, self.size)]:
            if start > place:
                gaps.append((place, start))
            place = max(place, end)
        return gaps

    def prepare(self) -> None:
        """Make the file where nothing is there yet. Raises ``OSError``."""
        if self._ranges:
            return
        self.delete()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("xb") as file:
            file.truncate(self.size)
        self._journal.write_text(self._header, encoding="utf-8")

    def open(self) -> int:
        """A descriptor to write to. Raises ``OSError``."""
        return os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def record(self, descriptor: int, start: int, end: int) -> None:
        """Note that the bytes of a range were written."""
        os.fdatasync(descriptor)
        with self._lock:
            with self._journal.open("a") as journal:
                journal.write(f"{start} {end}\n")
            self._ranges = _merged([*self._ranges, (start, end)])

    def delete(self) -> None:
        """Delete the bytes and the journal."""
        self._ranges = []
        self.path.unlink(missing_ok=True)
        self.delete_journal()

    def delete_journal(self) -> None:
        self._journal.unlink(missing_ok=True)


def delete_leftovers(folder: Path, keep: Collection[Path]) -> None:
    """Delete the partial files of a folder but those, which are of files that can be fetched still."""
    for path in folder.glob(f"*{SUFFIX}*"):
        if path.with_name(path.name.removesuffix(JOURNAL)) not in keep:
            path.unlink(missing_ok=True)


def _read_journal(path: Path, header: str) -> list[Range]:
    """The ranges; none of a journal that does not begin with ``header``. A last line that was cut is ignored."""
    with contextlib.suppress(OSError, ValueError):
        first, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if first == header:
            pairs = (line.split() for line in lines if line.endswith("\n"))
            return _merged((int(start), int(end)) for start, end in pairs)
    return []


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """In ascending order, without overlaps."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result
