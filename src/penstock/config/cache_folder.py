"""The folder of the weight cache: its place, its size limit, and eviction of the least recently used files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from .user_folders import cache_home

SUFFIX = ".packed"
UNFINISHED = ".part"
"""Suffix of files that are being written. Their writers hold a lock on them."""
DEFAULT_SHARE = 0.3
"""Share of the disk that the cache may take where no size is given."""
RESERVED_SHARE = 0.1
"""Share of the disk that the cache always leaves free."""


def cache_folder(name: str) -> Path | None:
    """The folder that ``weight_cache_dir`` names: the user's default for an empty name, None for ``none``."""
    if name == "none":
        return None
    return Path(name) if name else cache_home() / "penstock"


@dataclass(frozen=True)
class DiskUsage:
    """The disk usage of a weight cache."""

    files: int
    """Number of files."""
    used: int
    """Bytes."""
    limit: int
    """Bytes."""


def disk_usage(folder: Path, limit: float) -> DiskUsage:
    """The disk usage of a weight cache; ``limit`` is ``weight_cache_size`` in GiB, 0 for the default."""
    sizes = [status.st_size for _, status in _entries(folder, SUFFIX)]
    return DiskUsage(len(sizes), sum(sizes), limit_bytes(folder, limit))


def limit_bytes(folder: Path, limit: float) -> int:
    """``limit`` GiB, or the default share of the folder's disk."""
    if limit:
        return int(limit * 2**30)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return int(shutil.disk_usage(there).total * DEFAULT_SHARE)


def open_cached(path: Path) -> IO[bytes]:
    """Open a file of the cache to read. Marks it as used now, and locks it, so that no process evicts it.

    The lock lasts until the file and every mapping of it are closed.

    Raises ``OSError`` where there is no such file; ``PermissionError`` where another user wrote it, or could have.
    """
    # A symbolic link is not followed, and opening a FIFO does not wait for its writer.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError("it is no regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"it belongs to another user (uid {status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})")
        with contextlib.suppress(OSError):  # of file systems without locks, and a cache that may only be read
            fcntl.flock(file, fcntl.LOCK_SH)
            os.utime(file.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def new_file(path: Path, size: int, limit: int) -> Iterator[IO[bytes]]:
    """A file to write, which is renamed to ``path`` when the block ends without an error.

    Room for it is reserved first, under a lock on the folder: the least recently used files are deleted, but none that
    an engine has mapped.

    Raises ``OSError`` where there is not enough room.
    """
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with locked_folder(folder):
            _make_room(path, size, limit)
            file = stack.enter_context(NamedTemporaryFile(dir=folder, prefix=f"{path.stem}.", suffix=UNFINISHED))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)  # so that the next writer counts it, though nothing is written yet
        yield file
        file.flush()
        os.fsync(file.fileno())  # before the name exists: a loss of power must not leave a name without its data
        os.link(file.name, written := file.name + UNFINISHED)
        os.replace(written, path)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of those who make room in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # of file systems that lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_room(replaced: Path, size: int, limit: int) -> None:
    """Delete files until there is room for ``size`` bytes in place of the file ``replaced``."""
    if size > limit:
        raise OSError(f"they have {size / 2**30:.2g} GiB, and weight_cache_size is {limit / 2**30:.2g} GiB")
    folder = replaced.parent
    for path, _ in _entries(folder, UNFINISHED):
        _delete_unused(path)  # its writer has died
    writing = [status for _, status in _entries(folder, UNFINISHED)]
    entries = [entry for entry in _entries(folder, SUFFIX) if entry[0] != replaced]
    disk = shutil.disk_usage(folder)
    promised = sum(max(0, status.st_size - status.st_blocks * 512) for status in writing)
    free = int(disk.free - promised - RESERVED_SHARE * disk.total)
    room = min(limit - sum(s.st_size for s in writing) - sum(s.st_size for _, s in entries), free)
    for path, status in sorted(entries, key=lambda entry: entry[1].st_atime_ns):
        if room >= size:
            break
        if _delete_unused(path):
            room += status.st_size
    if room < size:
        left = (
            f"{max(room, 0) / 2**30:.2g} GiB of {limit / 2**30:.2g}, {RESERVED_SHARE:.0%} of the disk being kept free"
        )
        raise OSError(f"they have {size / 2**30:.2g} GiB, and {folder} has room for {left}")


def _delete_unused(path: Path) -> bool:
    """Delete a file unless a process has locked it; returns whether it was deleted."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


def _entries(folder: Path, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*{suffix}"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield path, status
