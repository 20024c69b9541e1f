"""Temporary folders, and removal of the folders of killed processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from penstock.core.errors import invalid

PREFIX, LOCK = "penstock-", ".penstock.lock"
"""Prefix of the folders' names, and the file in each folder that is locked while its process runs."""


MAX_LENGTH = 80
"""Maximum bytes of the path of the system's temporary folder: a Unix socket's path has at most 107 bytes."""


class TemporaryFolder:
    """A folder in the system's temporary folder, removed by ``close``.

    The constructor also removes the folders of killed processes, as the kernel has released their locks.

    Args:
        kind: prefix of the folder's name, after ``penstock-``.

    Raises ``PenstockError`` (``invalid``) if the path of the system's temporary folder is too long for sockets in it.
    """

    def __init__(self, kind: str = "") -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > MAX_LENGTH:
            message = f"{parent} must have at most {MAX_LENGTH} bytes, as sockets are created in it: set another folder"
            raise invalid("TMPDIR", message, MAX_LENGTH)
        remove_unlocked(Path(parent))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}"))
            with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
                if (lock := _locked(self.path, os.O_CREAT)) is not None:
                    self._lock = lock
                    return

    def touch(self) -> None:
        """Set the times of the folder and its lock file to now, so that they are not removed as old ones. Raises
        ``OSError`` if they were removed."""
        os.utime(self.path / LOCK)
        os.utime(self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_unlocked(parent: Path) -> None:
    """Remove this user's folders with an unlocked lock file: those of killed processes."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # the folder has no lock file, or another process removed it
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if (lock := _locked(folder, 0)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path, flags: int) -> int | None:
    """Lock a folder; returns the lock's descriptor, None if another process holds the lock. Raises ``OSError``."""
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except BlockingIOError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
