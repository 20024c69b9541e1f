"""Persistent state of a download (manifest and lock), in the downloaded folder."""

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
    """State of a download."""

    source: str
    listing: list[RemoteFile]
    """All files of the source."""
    wanted: list[str]
    """Paths of the files selected by the last command."""
    done: dict[str, int] = {}
    """Modification times (``st_mtime_ns``) of complete files by path."""


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest; None if it is missing or malformed."""
    try:
        return msgspec.json.decode((folder / STATE_FOLDER / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically. Raises ``OSError``."""
    replace(folder / STATE_FOLDER / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def missing_files(folder: Path) -> list[str]:
    """Paths of the files that a download into the folder has not completed; empty if the folder is no download."""
    manifest = read_manifest(folder)
    return [path for path in manifest.wanted if path not in manifest.done] if manifest else []


def replace(path: Path, content: bytes) -> None:
    """Write a small file atomically. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context that holds an exclusive file lock, if the file system supports locks. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process that downloads the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
