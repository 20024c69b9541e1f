"""What a folder knows of the download that fills it, and the lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .remote import STATE_FOLDER, RemoteFile

logger = logging.getLogger(__name__)

MANIFEST, LOCK, PARTS = "manifest.json", "lock", "parts"


class Manifest(msgspec.Struct):
    """The state of a download."""

    source: str
    listing: list[RemoteFile]
    """All files of the source."""
    wanted: list[str]
    """Those that the last command has asked for."""
    done: dict[str, int] = {}
    """The files that are whole, and when each was written (``st_mtime_ns``)."""


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest; None where there is none, or a damaged one."""
    try:
        return msgspec.json.decode((folder / STATE_FOLDER / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest, whole or not at all. Raises ``OSError``."""
    replace(folder / STATE_FOLDER / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def missing_files(folder: Path) -> list[str]:
    """The files that a download of this folder has not finished; none for a folder that was not downloaded."""
    manifest = read_manifest(folder)
    return [path for path in manifest.wanted if path not in manifest.done] if manifest else []


def replace(path: Path, content: bytes) -> None:
    """Write a small file, whole or not at all. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process at a time has. File systems without locks let all pass. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process downloads the same, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
