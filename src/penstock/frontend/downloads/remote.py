"""What sources of models have in common: files with sizes and checksums, of which ranges of bytes can be read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import msgspec

from penstock.core.errors import Code, PenstockError, invalid

MAX_PATH, MAX_NAME = 1024, 240
"""Characters of a file's path and of each of its parts."""
STATE_FOLDER = ".penstock"
"""Folder of a download's own files, inside the folder that it fills."""


class RemoteFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a source."""

    path: str
    """Relative, with ``/``."""
    size: int
    """Bytes."""
    sha256: str = ""
    git_sha1: str = ""
    """The hash by which git knows the content; files of hubs that are not in LFS have this one only."""
    version: str = ""
    """What changes with the content where there is no checksum: an ETag, a time of modification."""

    @property
    def identity(self) -> str:
        """Equal for equal contents."""
        return self.sha256 or self.git_sha1 or f"{self.size} {self.version}"

    def digest(self) -> Digest | None:
        """To check the content with; None where the source gives no checksum."""
        if self.sha256:
            return Digest(hashlib.sha256(), self.sha256)
        if self.git_sha1:
            return Digest(hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False), self.git_sha1)
        return None


@dataclass
class Digest:
    """A running hash and the value that it should have."""

    running: Any
    expected: str

    def matches(self, path: Path) -> bool:
        """Whether the file's content has the expected hash."""
        with path.open("rb") as file:
            while block := file.read(2**20):
                self.running.update(block)
        return bool(self.running.hexdigest() == self.expected.lower())


@dataclass(frozen=True)
class Listing:
    """The files of a model at one version."""

    files: Sequence[RemoteFile]
    version: str = ""
    """The commit, where the source has commits."""


class InterruptedTransferError(Exception):
    """A transfer failed in a way that another attempt may not.

    Args:
        pause: seconds that the source asks to wait.
    """

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class RangesIgnoredError(Exception):
    """The source sends files from their beginning only."""


class Source(Protocol):
    """Where a model's files are."""

    name: str
    """For messages and manifests, without secrets."""

    def list_files(self) -> Listing:
        """The files. Raises ``PenstockError``: ``not_found``, ``invalid``, or ``unavailable`` without a connection."""

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """The bytes from ``start`` to before ``end``.

        Raises ``InterruptedTransferError``, ``RangesIgnoredError``; ``PenstockError`` where another attempt is of no
        use.
        """


def check_paths(files: Sequence[RemoteFile], source: str) -> None:
    """Raises ``PenstockError`` (``invalid``) for a listing with paths that lead elsewhere, or that exclude each other,
    and for impossible sizes."""
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
            raise invalid("model", f"{source} lists a file {file.path[:80]!r}, which is no path in a folder")
        if file.size < 0 or file.path in paths:
            raise invalid("model", f"{source} lists {file.path} with a size below 0, or twice")
        paths.add(file.path)
    for path in paths:
        if above := next((parent for parent in map(str, PurePosixPath(path).parents) if parent in paths), ""):
            raise invalid("model", f"{source} lists {above} as a file and as a folder")


def unavailable(source: str, problem: object, advice: str = "check the network, or give a folder") -> PenstockError:
    """The error for a source that cannot be reached or keeps failing; only the first line of ``problem`` is told."""
    line = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    return PenstockError(Code.UNAVAILABLE, f"model: {source} cannot be fetched ({line.rstrip('.')}): {advice}", "model")
