"""Fetches files: in parallel, resumed where an earlier attempt stopped, checked, and named when they are whole."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.config.progress import Progress, log_or_print
from penstock.core.errors import PenstockError, invalid

from .partial_file import PartialFile, Range
from .remote import InterruptedTransferError, RangesIgnoredError, RemoteFile, Source, unavailable

logger = logging.getLogger(__name__)

MAX_WORKERS = 8
"""Connections at the same time."""
PART_BYTES = 2**26
"""Bytes that a connection is asked for at a time."""
JOURNAL_BYTES = 2**23
"""Bytes after which an arriving part is synced to the disk and noted in the journal."""
RETRY_DELAYS = (0.0, 1.0, 2.0, 4.0)
"""Seconds before each further attempt, since a byte last arrived."""
WHOLE_ATTEMPTS = 3
"""How often a file is fetched whose bytes are wrong."""
MAX_PAUSE = 120.0
"""Seconds that a source may ask to wait."""


STOP_TIMEOUT = 2.0
"""Seconds for the other connections to note what has arrived, when one has failed."""


class Destination(Protocol):
    """Where files are put."""

    folder: Path
    """The folder of the files."""

    def has(self, file: RemoteFile) -> bool:
        """Whether the whole file is there."""

    def partial_path(self, file: RemoteFile) -> Path:
        """Where its bytes arrive, on the same file system."""

    def put(self, file: RemoteFile, whole: Path) -> None:
        """Give a whole file, which is on the disk, its name."""


def fetch(
    source: Source,
    files: Sequence[RemoteFile],
    destination: Destination,
    max_workers: int = MAX_WORKERS,
    progress: bool = True,
) -> None:
    """Fetch the files that are not there yet.

    Args:
        max_workers: connections at the same time.
        progress: show a progress bar.

    Raises ``PenstockError``: ``unavailable`` where the source keeps failing, ``invalid`` where the disk has no room or
    contents are not those that the source announced; what arrived is kept for the next call.
    """
    try:
        while lacking := [file for file in files if not destination.has(file)]:
            each_once = {destination.partial_path(file): file for file in lacking}  # several may have one content
            partials = {file: PartialFile(path, file) for path, file in each_once.items()}
            check_disk_space(destination.folder, sum(partial.room_needed for partial in partials.values()))
            _Download(source, destination, partials, len(files), progress).run(max_workers)
    except OSError as error:
        raise cannot_write(error, destination.folder) from error


def check_disk_space(folder: Path, needed: int) -> None:
    """Raises ``PenstockError`` (``invalid``) where fewer bytes than that are free."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        words = f"{needed:,} bytes are needed, and {free:,} are free in {there}: make room, or name another folder"
        raise invalid("download_dir", words, free)


def cannot_write(error: OSError, folder: Path) -> PenstockError:
    """The error for a folder that cannot be written."""
    place = error.filename or folder
    return invalid(
        "download_dir", f"cannot write {place} ({error.strerror or error}): make room, or name another folder"
    )


class _Download:
    """The threads of one call of ``fetch``, and the parts that are left for them.

    The threads are daemons: a key that interrupts the program ends it at once, and the next call goes on from the
    journals.
    """

    def __init__(
        self,
        source: Source,
        destination: Destination,
        partials: dict[RemoteFile, PartialFile],
        num_files: int,
        progress: bool,
    ) -> None:
        self._source = source
        self._destination = destination
        self.source_name = source.name
        self._changed = threading.Condition()
        self._naming = threading.Lock()
        self._error: BaseException | None = None
        self._waiting = deque(_FileTransfer(self, file, partial) for file, partial in partials.items())
        self._parts: deque[tuple[_FileTransfer, Range]] = deque()
        self._num_open = len(self._waiting)
        self._bar = Progress(
            f"fetching {num_files} files",
            sum(partial.size for partial in partials.values()),
            "B",
            log_or_print(logger),
            sum(partial.num_bytes for partial in partials.values()),
            progress,
        )

    def run(self, max_workers: int) -> None:
        """Returns when all files have their names; raises what a thread raised."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(max_workers)]
        for thread in threads:
            thread.start()
        try:
            with self._changed:
                while self._num_open and not self._error:
                    self._changed.wait()
        finally:
            self._bar.close()
        if self._error:
            end = time.monotonic() + STOP_TIMEOUT
            for thread in threads:
                thread.join(max(end - time.monotonic(), 0))
            raise self._error

    def check(self) -> None:
        """Raises ``_StoppedError`` where another thread has failed."""
        if self._error:
            raise _StoppedError

    def arrived(self, count: int) -> None:
        with self._changed:
            self._bar.update(count)

    def read(self, file: RemoteFile, start: int, end: int, write: Callable[[bytes], None]) -> None:
        """Pass the bytes of a range to ``write``, with further attempts from where one was interrupted."""
        delays = iter(RETRY_DELAYS)
        while start < end:
            try:
                for block in self._source.read(file, start, end):
                    if len(block) > end - start:
                        raise InterruptedTransferError(f"{file.path} has more bytes than announced")
                    write(block)
                    start += len(block)
                    delays = iter(RETRY_DELAYS)
                    self.check()
                if start < end:
                    raise InterruptedTransferError(f"{file.path} ended early")
            except InterruptedTransferError as error:
                delay = next(delays, None)
                if delay is None or error.pause > MAX_PAUSE:
                    raise unavailable(self._source.name, error) from error
                logger.warning("the transfer of %s was interrupted (%s), trying again", file.path, error)
                time.sleep(max(delay, error.pause))
                self.check()

    def put(self, file: RemoteFile, whole: Path) -> None:
        """Give a whole file its name, once it is on the disk."""
        with whole.open("rb") as content:
            os.fsync(content.fileno())
        with self._naming:
            self._destination.put(file, whole)
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while taken := self._take():
                transfer, part = taken
                transfer.run_part(part)
        except _StoppedError:
            pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> tuple[_FileTransfer, Range] | None:
        """The next part; None where there is none left."""
        while not self._error:
            with self._changed:
                if self._parts:
                    return self._parts.popleft()
                if not self._waiting:
                    return None
                transfer = self._waiting.popleft()
                parts = transfer.begin()
                self._parts.extend((transfer, part) for part in parts[1:])
            return transfer, parts[0]
        return None


class _StoppedError(Exception):
    """Another thread has failed."""


@dataclass
class _FileTransfer:
    """One file of a download."""

    download: _Download
    file: RemoteFile
    partial: PartialFile
    num_parts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> list[Range]:
        """The parts that are missing, at least one, which may be empty."""
        self.partial.prepare()
        parts = [
            (first, min(first + PART_BYTES, end))
            for start, end in self.partial.missing()
            for first in range(start, end, PART_BYTES)
        ]
        self.num_parts = len(parts) or 1
        return parts or [(0, 0)]

    def run_part(self, part: Range) -> None:
        """Fetch a part; after the last one, check the file and give it its name."""
        with contextlib.suppress(RangesIgnoredError):  # the whole file is fetched in the end
            self._fetch(*part)
        with self.lock:
            self.num_parts -= 1
            if self.num_parts:
                return
        self._make_whole()
        self.download.put(self.file, self.partial.path)
        self.partial.delete_journal()

    def _make_whole(self) -> None:
        """Check the file; fetch it again from the beginning where bytes are wrong, or missing because the source sends
        no ranges."""
        for _ in range(WHOLE_ATTEMPTS):
            digest = self.file.digest()
            if not self.partial.missing() and (not digest or digest.matches(self.partial.path)):
                return
            self.download.arrived(-self.partial.num_bytes)
            self.partial.delete()
            self.partial.prepare()
            with contextlib.suppress(RangesIgnoredError):
                self._fetch(0, self.file.size)
        self.partial.delete()
        words = f"{self.file.path} of {self.download.source_name} does not have the checksum that is announced there"
        raise invalid("model", f"{words}, after {WHOLE_ATTEMPTS} attempts: try again later, or from another source")

    def _fetch(self, start: int, end: int) -> None:
        place, noted = start, start
        descriptor = self.partial.open()

        def write(block: bytes) -> None:
            nonlocal place, noted
            written = 0
            while written < len(block):
                written += os.pwrite(descriptor, block[written:], place + written)
            place += len(block)
            self.download.arrived(len(block))
            if place - noted >= JOURNAL_BYTES:
                self.partial.record(descriptor, noted, place)
                noted = place

        try:
            self.download.read(self.file, start, end, write)
        finally:
            if place > noted:
                self.partial.record(descriptor, noted, place)
            os.close(descriptor)
