"""Interface of download sources: file listings with sizes and checksums, and reads of byte ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import msgspec

from penstock.core.errors import Code, PenstockError, invalid

MAX_PATH, MAX_NAME = 1024, 240
"""Limits of a path in characters, and of each of its components in bytes."""
STATE_FOLDER = ".penstock"
"""Folder with the state of a download, inside the downloaded folder."""


class RemoteFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """File of a source."""

    path: str
    """Relative path with the separator ``/``."""
    size: int
    """Size in bytes."""
    sha256: str = ""
    git_sha1: str = ""
    """Git blob hash; hubs list no other hash for files outside of LFS."""
    version: str = ""
    """ETag or modification time, for sources without checksums."""

    @property
    def identity(self) -> str:
        """Identifier of the content: equal for equal contents."""
        return self.sha256 or self.git_sha1 or f"{self.size} {self.version}"

    def digest(self) -> Digest | None:
        """Digest to check the content with; None if the source has no checksum."""
        if self.sha256:
            return Digest(hashlib.sha256(), self.sha256)
        if self.git_sha1:
            return Digest(hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False), self.git_sha1)
        return None


@dataclass
class Digest:
    """Hash computed while a file is read, and its expected value."""

    running: Any
    expected: str

    def matches(self, path: Path) -> bool:
        """True if a file has the expected hash."""
        with path.open("rb") as file:
            while block := file.read(2**20):
                self.running.update(block)
        return bool(self.running.hexdigest() == self.expected.lower())


@dataclass(frozen=True)
class Listing:
    """Files of a model at one version."""

    files: Sequence[RemoteFile]
    version: str = ""
    """Commit hash; empty for sources without commits."""


class InterruptedTransferError(Exception):
    """A transfer failed, and a retry may succeed.

    Args:
        pause: seconds to wait before the retry, as requested by the source.
    """

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class RangesIgnoredError(Exception):
    """The source does not support range requests."""


class Source(Protocol):
    """Source of a model's files."""

    name: str
    """Name for messages and manifests, without secrets."""

    def list_files(self) -> Listing:
        """List the files. Raises ``PenstockError``: ``not_found``, ``invalid``, or ``unavailable`` if the source cannot
        be reached."""

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """Read the bytes from ``start`` (inclusive) to ``end`` (exclusive).

        Raises ``InterruptedTransferError``, ``RangesIgnoredError``; ``PenstockError`` if a retry is useless.
        """


def check_paths(files: Sequence[RemoteFile], source: str) -> None:
    """Raise ``PenstockError`` (``invalid``) for a listing with unsafe or conflicting paths, or negative sizes."""
    paths: set[str] = set()
    for file in files:
        parts = file.path.split("/")
        if (
            not file.path.isprintable()
            or "\\" in file.path
            or len(file.path) > MAX_PATH
            or any(part in ("", ".", "..") or len(part.encode()) > MAX_NAME for part in parts)
            or parts[0] == STATE_FOLDER
        ):
            raise invalid("model", f"{source} lists {file.path[:80]!r}, which is not a valid relative path")
        if file.size < 0 or file.path in paths:
            problem = "twice" if file.path in paths else f"with the size {file.size}"
            raise invalid("model", f"{source} lists {file.path} {problem}")
        paths.add(file.path)
    for path in paths:
        if above := next((parent for parent in map(str, PurePosixPath(path).parents) if parent in paths), ""):
            raise invalid("model", f"{source} lists {above} both as a file and as a folder")


def unavailable(source: str, problem: object, advice: str = "check the network, or give a folder") -> PenstockError:
    """The error for a source that cannot be reached or keeps failing, with the first line of ``problem``."""
    line = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    return PenstockError(Code.UNAVAILABLE, f"model: {source} cannot be fetched ({line.rstrip('.')}): {advice}", "model")
