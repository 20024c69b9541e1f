"""Hugging Face's shared cache as the destination of a download.

Its layout is documented by ``huggingface_hub`` ("Understand caching"): ``blobs`` has files by hash, ``snapshots`` a
folder of links to them per commit, ``refs`` the commit of each branch and tag, and ``trees`` the file list of each
commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from .partial_file import SUFFIX, delete_leftovers
from .remote import Listing, RemoteFile, check_paths
from .state import locked, replace

TREE_VERSION = 1


class _Entry(msgspec.Struct, omit_defaults=True):
    """File in a listing."""

    size: int
    blob_id: str
    lfs_sha256: str = ""
    lfs_size: int = 0


class _Tree(msgspec.Struct):
    format_version: int
    files: dict[str, _Entry]


class HubCache:
    """``Destination``: the snapshot of one commit.

    Args:
        cache: root folder of the cache.
    """

    def __init__(self, cache: Path, repository: str, commit: str) -> None:
        self._model = model_folder(cache, repository)
        self._lock = cache / ".locks" / self._model.name / "penstock.lock"
        self._commit = commit
        self.folder = self._model / "snapshots" / commit

    @contextmanager
    def filling(self, listing: Listing) -> Iterator[None]:
        """Context that locks the model; writes the listing first, and deletes leftover partial files at the end. Raises
        ``OSError``."""
        with locked(self._lock):
            tree = _Tree(TREE_VERSION, {file.path: _entry(file) for file in listing.files})
            replace(self._tree, msgspec.json.encode(tree))
            yield
            delete_leftovers(self._model / "blobs", {self.partial_path(file) for file in listing.files})

    def listing(self) -> Listing | None:
        """Listing of the commit from the cache; None if it is missing or malformed."""
        try:
            tree = msgspec.json.decode(self._tree.read_bytes(), type=_Tree)
        except (OSError, msgspec.MsgspecError):
            return None
        if tree.format_version != TREE_VERSION:
            return None
        files = [
            RemoteFile(path, entry.size, entry.lfs_sha256, "" if entry.lfs_sha256 else entry.blob_id)
            for path, entry in tree.files.items()
        ]
        check_paths(files, str(self._tree))
        return Listing(files, self._commit)

    def present(self) -> list[RemoteFile]:
        """Files in the snapshot, including those fetched by other programs."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [RemoteFile(path.relative_to(self.folder).as_posix(), path.stat().st_size) for path in paths]

    def has(self, file: RemoteFile) -> bool:
        """True if the file is in the snapshot. A blob fetched for another commit is linked first."""
        link, blob = self.folder / file.path, self._blob(file)
        with suppress(OSError):
            return link.stat().st_size == file.size
        with suppress(OSError):
            if blob.stat().st_size == file.size:
                self._link(link, blob)
                return True
        return False

    def partial_path(self, file: RemoteFile) -> Path:
        blob = self._blob(file)
        return blob.with_name(blob.name + SUFFIX)

    def put(self, file: RemoteFile, downloaded: Path) -> None:
        downloaded.replace(self._blob(file))
        self._link(self.folder / file.path, self._blob(file))

    def name_revision(self, revision: str) -> None:
        """Record that a branch or tag points to this commit. Does nothing if the cache is read-only."""
        path = self._model / "refs" / revision
        with suppress(OSError):
            if not path.is_file() or path.read_text(encoding="utf-8") != self._commit:
                replace(path, self._commit.encode())

    def _blob(self, file: RemoteFile) -> Path:
        return self._model / "blobs" / (file.sha256 or file.git_sha1)

    @property
    def _tree(self) -> Path:
        return self._model / "trees" / f"{self._commit}.json"

    @staticmethod
    def _link(link: Path, blob: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(os.path.relpath(blob, link.parent))
        except OSError:  # the file system does not support symbolic links
            blob.replace(link)


def model_folder(cache: Path, repository: str) -> Path:
    """Folder of a model in the cache."""
    return cache / "--".join(["models", *repository.split("/")])


def commit_of(cache: Path, repository: str, revision: str) -> str:
    """Commit that a branch or tag pointed to when it was last fetched; empty: it was never fetched."""
    try:
        return (model_folder(cache, repository) / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _entry(file: RemoteFile) -> _Entry:
    if file.sha256:
        return _Entry(file.size, file.git_sha1 or file.sha256, file.sha256, file.size)
    return _Entry(file.size, file.git_sha1)
