"""Parallel, resumable downloads of files. A file gets its final name when it is complete and its hash is checked."""

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
"""Number of concurrent connections."""
PART_BYTES = 2**26
"""Size of a range request in bytes."""
JOURNAL_BYTES = 2**23
"""Number of bytes after which a part is synced to disk and recorded in the journal."""
RETRY_DELAYS = (0.0, 1.0, 2.0, 4.0)
"""Seconds to wait before each retry; reset when bytes arrive."""
MAX_FILE_ATTEMPTS = 3
"""Maximum number of times that a file with a wrong hash is fetched again."""
MAX_PAUSE = 120.0
"""Longest ``Retry-After`` of a source, in seconds, that is waited for; a longer wait is an error."""
STOP_TIMEOUT = 2.0
"""Seconds to wait, after a thread has failed, until the other threads have recorded their progress."""


class Destination(Protocol):
    """Folder that files are downloaded to."""

    folder: Path
    """Folder with the files."""

    def has(self, file: RemoteFile) -> bool:
        """True if the complete file exists."""

    def partial_path(self, file: RemoteFile) -> Path:
        """Path of the incomplete file, on the file system of the final path."""

    def put(self, file: RemoteFile, downloaded: Path) -> None:
        """Move a complete file, which is synced to disk, to its final path."""


def fetch(
    source: Source,
    files: Sequence[RemoteFile],
    destination: Destination,
    max_workers: int = MAX_WORKERS,
    progress: bool = True,
) -> None:
    """Fetch the files that the destination does not have.

    Args:
        max_workers: number of concurrent connections.
        progress: show a progress bar.

    Raises ``PenstockError``: ``unavailable`` if the source keeps failing, ``invalid`` if disk space is missing or a
    hash is wrong. The next call resumes the download.
    """
    try:
        while missing := [file for file in files if not destination.has(file)]:
            # Files with the same content share a path.
            unique = {destination.partial_path(file): file for file in missing}
            partials = {file: PartialFile(path, file) for path, file in unique.items()}
            check_disk_space(destination.folder, sum(partial.space_needed for partial in partials.values()))
            _Download(source, destination, partials, len(files), progress).run(max_workers)
    except OSError as error:
        raise cannot_write(error, destination.folder) from error


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise ``PenstockError`` (``invalid``) if fewer than ``needed`` bytes are free."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        message = f"{needed:,} bytes are needed, and {free:,} are free in {existing}: free space, or use another folder"
        raise invalid("download_dir", message, free)


def cannot_write(error: OSError, folder: Path) -> PenstockError:
    """The error for a folder that cannot be written."""
    problem = f"cannot write {error.filename or folder} ({error.strerror or error})"
    return invalid("download_dir", f"{problem}: free space, or use another folder")


class _Download:
    """Threads of one ``fetch`` call, and their queue of parts.

    The threads are daemons, so that Ctrl-C ends the program immediately; the next call resumes from the journals.
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
        self._put_lock = threading.Lock()
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
        """Fetch all files; raises the first error of a thread."""
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
        """Raise ``_StoppedError`` if another thread has failed."""
        if self._error:
            raise _StoppedError

    def add_progress(self, count: int) -> None:
        with self._changed:
            self._bar.update(count)

    def read(self, file: RemoteFile, start: int, end: int, write: Callable[[bytes], None]) -> None:
        """Pass the bytes of a range to ``write``; after an interruption, retry with the remaining range."""
        delays = iter(RETRY_DELAYS)
        while start < end:
            try:
                for block in self._source.read(file, start, end):
                    if len(block) > end - start:
                        raise InterruptedTransferError(f"the server sent more bytes of {file.path} than requested")
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
                logger.warning("the download of %s was interrupted (%s); retrying", file.path, error)
                time.sleep(max(delay, error.pause))
                self.check()

    def put(self, file: RemoteFile, downloaded: Path) -> None:
        """Sync a complete file to disk and move it to its final path."""
        with downloaded.open("rb") as content:
            os.fsync(content.fileno())
        with self._put_lock:
            self._destination.put(file, downloaded)
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
        """Next part to fetch; None: all parts are taken, or a thread has failed."""
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
        """Create or resume the partial file; returns its missing parts, or one empty part if nothing is missing."""
        self.partial.prepare()
        parts = [
            (first, min(first + PART_BYTES, end))
            for start, end in self.partial.missing()
            for first in range(start, end, PART_BYTES)
        ]
        self.num_parts = len(parts) or 1
        return parts or [(0, 0)]

    def run_part(self, part: Range) -> None:
        """Fetch a part. After the last part, check the file and move it to its final path."""
        with contextlib.suppress(RangesIgnoredError):  # _complete then fetches the whole file
            self._fetch(*part)
        with self.lock:
            self.num_parts -= 1
            if self.num_parts:
                return
        self._complete()
        self.download.put(self.file, self.partial.path)
        self.partial.delete_journal()

    def _complete(self) -> None:
        """Check the file. Fetch it again from the beginning if its hash is wrong, or if parts are missing because the
        source does not support ranges."""
        for _ in range(MAX_FILE_ATTEMPTS):
            digest = self.file.digest()
            if not self.partial.missing() and (not digest or digest.matches(self.partial.path)):
                return
            self.download.add_progress(-self.partial.num_bytes)
            self.partial.delete()
            self.partial.prepare()
            with contextlib.suppress(RangesIgnoredError):
                self._fetch(0, self.file.size)
        self.partial.delete()
        problem = f"{self.file.path} of {self.download.source_name} has a wrong checksum"
        raise invalid("model", f"{problem} after {MAX_FILE_ATTEMPTS} attempts: try again later, or use another source")

    def _fetch(self, start: int, end: int) -> None:
        offset, recorded = start, start
        descriptor = self.partial.open()

        def write(block: bytes) -> None:
            nonlocal offset, recorded
            written = 0
            while written < len(block):
                written += os.pwrite(descriptor, block[written:], offset + written)
            offset += len(block)
            self.download.add_progress(len(block))
            if offset - recorded >= JOURNAL_BYTES:
                self.partial.record(descriptor, recorded, offset)
                recorded = offset

        try:
            self.download.read(self.file, start, end, write)
        finally:
            if offset > recorded:
                self.partial.record(descriptor, recorded, offset)
            os.close(descriptor)
