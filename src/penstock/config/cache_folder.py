"""Folder of the weight cache: path, size limit, and eviction of the least recently used files."""

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
"""Default size limit of the cache, as a share of the disk."""
RESERVED_SHARE = 0.1
"""Share of the disk that caches always leave free, up to ``MAX_RESERVED``."""
MAX_RESERVED = 8 * 2**30
"""Bytes; a share of a large disk would forbid a cache on a disk that has hundreds of GiB left."""
RESERVED = f"{RESERVED_SHARE:.0%} of the disk, at most {MAX_RESERVED >> 30} GiB, stay free"
"""The two limits in words."""


def cache_folder(name: str) -> Path | None:
    """Folder for a value of ``weight_cache_dir``: the default for an empty string, None for ``none``."""
    if name == "none":
        return None
    return Path(name) if name else cache_home() / "penstock"


@dataclass(frozen=True)
class DiskUsage:
    """Number and size of the files in a weight cache, and its size limit."""

    files: int
    """Number of files."""
    used: int
    """Total size of the files in bytes."""
    limit: int
    """Size limit in bytes."""


def disk_usage(folder: Path, limit: float) -> DiskUsage:
    """Measure a weight cache; ``limit`` is ``weight_cache_size`` in GiB (0: default)."""
    sizes = [status.st_size for _, status in _entries(folder, SUFFIX)]
    return DiskUsage(len(sizes), sum(sizes), limit_bytes(folder, limit))


def limit_bytes(folder: Path, limit: float) -> int:
    """Size limit in bytes: ``limit`` GiB, or if it is 0, the default share of the folder's disk."""
    if limit:
        return int(limit * 2**30)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return int(shutil.disk_usage(existing).total * DEFAULT_SHARE)


def open_cached(path: Path) -> IO[bytes]:
    """Open a cached file for reading. Updates its access time, and locks it against eviction.

    The lock lasts until the file and all mappings of it are closed.

    Raises ``OSError`` if the file cannot be opened, ``PermissionError`` if another user can have written it.
    """
    # O_NOFOLLOW: do not follow a symbolic link. O_NONBLOCK: do not wait for the writer of a FIFO.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError("it is not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"it belongs to another user (uid {status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})")
        with contextlib.suppress(OSError):  # some file systems have no locks, and the cache may be read-only
            fcntl.flock(file, fcntl.LOCK_SH)
            os.utime(file.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def new_file(path: Path, size: int, limit: int) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, and rename it to ``path`` if the block ends without an error.

    First reserves ``size`` bytes, under a lock on the folder: if the cache would exceed ``limit`` bytes, the least
    recently used files are deleted, except those that an engine has mapped.

    Raises ``OSError`` if there is not enough room.
    """
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with locked_folder(folder):
            _make_room(path, size, limit)
            file = stack.enter_context(NamedTemporaryFile(dir=folder, prefix=f"{path.stem}.", suffix=UNFINISHED))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)  # other writers count this size before the data is written
        yield file
        file.flush()
        os.fsync(file.fileno())  # before renaming: a power loss must not leave a complete name with incomplete data
        os.link(file.name, written := file.name + UNFINISHED)
        os.replace(written, path)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which serializes evictions."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def available_bytes(folder: Path) -> int:
    """Number of bytes that a cache can still write in ``folder``; negative if less is free than caches must leave."""
    disk = shutil.disk_usage(folder)
    return disk.free - min(int(RESERVED_SHARE * disk.total), MAX_RESERVED)


def _make_room(replaced: Path, size: int, limit: int) -> None:
    """Delete files until there is room for ``size`` bytes, which will replace the file ``replaced``."""
    if size > limit:
        raise OSError(f"{size / 2**30:.2g} GiB are more than weight_cache_size ({limit / 2**30:.2g} GiB): increase it")
    folder = replaced.parent
    for path, _ in _entries(folder, UNFINISHED):
        _delete_unused(path)  # deletes files of writers that have died, as their locks are released
    writing = [status for _, status in _entries(folder, UNFINISHED)]
    entries = [entry for entry in _entries(folder, SUFFIX) if entry[0] != replaced]
    promised = sum(max(0, status.st_size - status.st_blocks * 512) for status in writing)
    used = sum(s.st_size for s in writing) + sum(s.st_size for _, s in entries)
    room = min(limit - used, available_bytes(folder) - promised)
    for path, status in sorted(entries, key=lambda entry: entry[1].st_atime_ns):
        if room >= size:
            break
        if _delete_unused(path):
            room += status.st_size
    if room < size:
        available = f"{max(room, 0) / 2**30:.2g} of {limit / 2**30:.2g} GiB ({RESERVED})"
        raise OSError(f"{size / 2**30:.2g} GiB are needed, and {folder} has room for {available}")


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
