"""The folder of the weight cache: where it is, how much it may hold, and which files leave it when it is full."""

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

SUFFIX = ".packed"
UNFINISHED = ".part"
"""Ends the names of files that are being written. Their writers hold a lock on them."""
SHARE = 0.3
"""Of the disk: what the cache may take where no size is given."""
SPARE = 0.1
"""Of the disk: what is always left free."""


def cache_folder(name: str) -> Path | None:
    """The folder of that name; for no name this user's default, for ``none`` no cache at all."""
    if name == "none":
        return None
    return Path(name) if name else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


@dataclass(frozen=True)
class Usage:
    """What a cache holds, in bytes."""

    files: int
    used: int
    limit: int


def usage(folder: Path, limit: float) -> Usage:
    """How full a cache is; ``limit`` is the option's value in GiB, 0 for the default."""
    sizes = [status.st_size for _, status in _entries(folder, SUFFIX)]
    return Usage(len(sizes), sum(sizes), limit_bytes(folder, limit))


def limit_bytes(folder: Path, limit: float) -> int:
    """``limit`` GiB, or the default share of the folder's disk."""
    if limit:
        return int(limit * 2**30)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return int(shutil.disk_usage(there).total * SHARE)


def open_cached(path: Path) -> IO[bytes]:
    """A file of the cache, to read; marked as used now, and locked so that no process deletes it to make room.

    The lock lasts until the file and every mapping of it are closed.

    Raises ``OSError`` where there is none; ``PermissionError`` where another user wrote it, or could have.
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
    """A file to write, which takes its name when the block ends without an error.

    Room for it is made and taken before, one process after the other: what was used least recently is deleted, but no
    file that an engine has mapped.

    Raises ``OSError`` where there is not enough room.
    """
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with _locked(folder):
            _make_room(path, size, limit)
            file = stack.enter_context(NamedTemporaryFile(dir=folder, prefix=f"{path.stem}.", suffix=UNFINISHED))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)  # counted by the next one, though nothing is written yet
        yield file
        file.flush()
        os.fsync(file.fileno())  # or a name might outlive, through a loss of power, what it is of
        os.link(file.name, written := file.name + UNFINISHED)
        os.replace(written, path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # of file systems that lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_room(replaced: Path, size: int, limit: int) -> None:
    """Delete files until there is room for one of that size in place of ``replaced``."""
    if size > limit:
        raise OSError(f"they have {size / 2**30:.2g} GiB, and weight_cache_size is {limit / 2**30:.2g} GiB")
    folder = replaced.parent
    for path, _ in _entries(folder, UNFINISHED):
        _delete_unused(path)  # its writer has died
    writing = [status for _, status in _entries(folder, UNFINISHED)]
    entries = [entry for entry in _entries(folder, SUFFIX) if entry[0] != replaced]
    disk = shutil.disk_usage(folder)
    promised = sum(max(0, status.st_size - status.st_blocks * 512) for status in writing)
    free = int(disk.free - promised - SPARE * disk.total)
    room = min(limit - sum(s.st_size for s in writing) - sum(s.st_size for _, s in entries), free)
    for path, status in sorted(entries, key=lambda entry: entry[1].st_atime_ns):
        if room >= size:
            break
        if _delete_unused(path):
            room += status.st_size
    if room < size:
        left = f"{max(room, 0) / 2**30:.2g} GiB of {limit / 2**30:.2g}, {SPARE:.0%} of the disk being kept free"
        raise OSError(f"they have {size / 2**30:.2g} GiB, and {folder} has room for {left}")


def _delete_unused(path: Path) -> bool:
    """Delete a file that no process has locked."""
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
