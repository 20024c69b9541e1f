"""Partially downloaded file with a journal, which survives crashes of the process and of the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from threading import Lock

from .remote import RemoteFile

SUFFIX, JOURNAL = ".part", ".ranges"
Range = tuple[int, int]
"""Byte range, start inclusive and end exclusive."""


class PartialFile:
    """File that is written range by range in any order, with a journal file that lists the written ranges.

    A range is recorded after its bytes are synced to disk, so that the journal is correct even after a power loss. If
    the journal belongs to another version of the file, both are discarded.

    Args:
        path: path of the partial file, with the suffix ``.part``.
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
        """Number of bytes written."""
        return sum(end - start for start, end in self._ranges)

    @property
    def space_needed(self) -> int:
        """Disk space in bytes that is still needed to complete the file."""
        try:
            used = self.path.stat().st_blocks * 512
        except OSError:
            used = 0
        return max(self.size - used, 0)

    def missing(self) -> list[Range]:
        """Ranges that are not written yet."""
        gaps, offset = [], 0
        for start, end in [*self._ranges, (self.size, self.size)]:
            if start > offset:
                gaps.append((offset, start))
            offset = max(offset, end)
        return gaps

    def prepare(self) -> None:
        """Create the file and the journal, unless ranges are already written. Raises ``OSError``."""
        if self._ranges:
            return
        self.delete()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("xb") as file:
            file.truncate(self.size)
        self._journal.write_text(self._header, encoding="utf-8")

    def open(self) -> int:
        """Open the file for writing; returns a file descriptor. Raises ``OSError``."""
        return os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def record(self, descriptor: int, start: int, end: int) -> None:
        """Sync a written range to disk and add it to the journal."""
        os.fdatasync(descriptor)
        with self._lock:
            with self._journal.open("a") as journal:
                journal.write(f"{start} {end}\n")
            self._ranges = _merged([*self._ranges, (start, end)])

    def delete(self) -> None:
        """Delete the file and the journal."""
        self._ranges = []
        self.path.unlink(missing_ok=True)
        self.delete_journal()

    def delete_journal(self) -> None:
        self._journal.unlink(missing_ok=True)


def delete_leftovers(folder: Path, keep: Collection[Path]) -> None:
    """Delete the partial files in a folder except ``keep``."""
    for path in folder.glob(f"*{SUFFIX}*"):
        if path.with_name(path.name.removesuffix(JOURNAL)) not in keep:
            path.unlink(missing_ok=True)


def _read_journal(path: Path, header: str) -> list[Range]:
    """Ranges in a journal; empty if it does not begin with ``header``. A truncated last line is ignored."""
    with contextlib.suppress(OSError, ValueError):
        first, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if first == header:
            pairs = (line.split() for line in lines if line.endswith("\n"))
            return _merged((int(start), int(end)) for start, end in pairs)
    return []


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges, and merge overlapping ranges."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result
