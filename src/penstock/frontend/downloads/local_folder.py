"""Plain folder as the destination of a download."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.core.errors import invalid

from .partial_file import SUFFIX, delete_leftovers
from .remote import STATE_FOLDER, Listing, RemoteFile
from .state import LOCK, PARTS, Manifest, locked, read_manifest, write_manifest


class LocalFolder:
    """``Destination``: a folder with the files, and the state of the download in ``.penstock``.

    Downloaded files that the source no longer has are deleted, so that no weights of an older version remain.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = Manifest("", [], [])

    @contextmanager
    def filling(self, source: str, listing: Listing, wanted: Sequence[RemoteFile]) -> Iterator[None]:
        """Context that locks the folder; writes the manifest first, and deletes leftover partial files at the end.
        Raises ``OSError``, and ``PenstockError`` (``invalid``) if files of another source would be replaced."""
        with locked(self.folder / STATE_FOLDER / LOCK):
            self._begin(source, listing, wanted)
            yield
            delete_leftovers(self.folder / STATE_FOLDER / PARTS, {self.partial_path(file) for file in listing.files})
            with suppress(OSError):  # the folder still has partial files
                (self.folder / STATE_FOLDER / PARTS).rmdir()

    def has(self, file: RemoteFile) -> bool:
        """True if the file was downloaded and not modified since, or has the checksum that the source lists."""
        path = self.folder / file.path
        try:
            status = path.stat()
        except OSError:
            return False
        if status.st_size != file.size or not path.is_file():
            return False
        if self._manifest.done.get(file.path) == status.st_mtime_ns:
            return True
        digest = file.digest()
        if not digest or not digest.matches(path):
            return False
        self._record(file)
        return True

    def partial_path(self, file: RemoteFile) -> Path:
        name = hashlib.sha256(file.path.encode()).hexdigest()[:32]
        return self.folder / STATE_FOLDER / PARTS / f"{name}{SUFFIX}"

    def put(self, file: RemoteFile, downloaded: Path) -> None:
        path = self.folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(self.folder.resolve()):
            message = f"{path.parent} is a link to a folder outside of {self.folder}: remove the link"
            raise invalid("download_dir", message)
        downloaded.replace(path)
        self._record(file)

    def complete(self, wanted: Sequence[RemoteFile]) -> bool:
        """True if all ``wanted`` files were downloaded and not modified since."""
        manifest = read_manifest(self.folder)
        if not manifest:
            return False
        self._manifest = manifest
        known = {file.path: file.identity for file in manifest.listing}
        return all(known.get(file.path) == file.identity and self.has(file) for file in wanted)

    def forget(self, files: Sequence[RemoteFile]) -> None:
        """Mark files as not downloaded. Raises ``OSError``."""
        for file in files:
            self._manifest.done.pop(file.path, None)
        write_manifest(self.folder, self._manifest)

    def _begin(self, source: str, listing: Listing, wanted: Sequence[RemoteFile]) -> None:
        known = read_manifest(self.folder) or Manifest(source, [], [])
        now = {file.path: file.identity for file in listing.files}
        if known.source != source:
            if existing := known.done.keys() & {file.path for file in wanted}:
                message = f"{self.folder} already has {min(existing)} of {known.source}: use another folder"
                raise invalid("download_dir", message)
            known = Manifest(source, [], [])
        for path in known.done.keys() - now.keys():
            self._remove(path, known.done[path])
        before = {file.path: file.identity for file in known.listing}
        done = {path: time for path, time in known.done.items() if path in now and before.get(path) == now[path]}
        self._manifest = Manifest(source, list(listing.files), [file.path for file in wanted], done)
        write_manifest(self.folder, self._manifest)

    def _remove(self, path: str, time: int) -> None:
        """Delete a downloaded file unless it was modified since."""
        target = self.folder / path
        if target.parent.resolve().is_relative_to(self.folder.resolve()):
            with suppress(OSError):
                if target.stat().st_mtime_ns == time:
                    target.unlink()

    def _record(self, file: RemoteFile) -> None:
        self._manifest.done[file.path] = (self.folder / file.path).stat().st_mtime_ns
        write_manifest(self.folder, self._manifest)
