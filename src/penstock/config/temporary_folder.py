"""Temporary folders that outlast their process for as long only as none of its kind starts again."""

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
"""Of the folders' names, and the file in each that is locked while its process runs."""


MAX_LENGTH = 80
"""Bytes of the name of the system's temporary folder: a socket's path has at most 107."""


class TemporaryFolder:
    """A folder in the system's temporary one, removed by ``close``. Making one also removes those of processes that
    were killed: the kernel has released their locks.

    Args:
        kind: what its name has after ``penstock-``.

    Raises ``PenstockError`` (``invalid``) where the name of the system's temporary folder is too long for sockets.
    """

    def __init__(self, kind: str = "") -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > MAX_LENGTH:
            raise invalid(
                "TMPDIR", f"{parent} has more than {MAX_LENGTH} bytes, too many for sockets in it; set another"
            )
        _sweep(Path(parent))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}"))
            with contextlib.suppress(FileNotFoundError):  # another process's sweep met it before it was locked
                if (lock := _locked(self.path, os.O_CREAT)) is not None:
                    self._lock = lock
                    return

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sweep(parent: Path) -> None:
    """Remove this user's folders whose locks nobody holds. Those without a lock are not ours."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process's, or another sweep was faster
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if (lock := _locked(folder, 0)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path, flags: int) -> int | None:
    """The descriptor of a folder's lock, which this process now holds; None where another does. Raises ``OSError``."""
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
