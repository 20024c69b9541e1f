"""A plain folder as the destination of a download."""

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
    """A ``Destination``: a folder with the files at their paths, and ``.penstock`` with the state of the download.

    Files that it has put there, and which the source no longer has, are deleted: an index of weights would lead to
    older ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = Manifest("", [], [])

    @contextmanager
    def filling(self, source: str, listing: Listing, wanted: Sequence[RemoteFile]) -> Iterator[None]:
        """Lock the folder and note what is going to be fetched. Raises ``OSError``, and ``PenstockError`` (``invalid``)
        where files of another source would be replaced."""
        with locked(self.folder / STATE_FOLDER / LOCK):
            self._begin(source, listing, wanted)
            yield
            delete_leftovers(self.folder / STATE_FOLDER / PARTS, {self.partial_path(file) for file in listing.files})
            with suppress(OSError):  # unless it has some
                (self.folder / STATE_FOLDER / PARTS).rmdir()

    def has(self, file: RemoteFile) -> bool:
        """Also for a file that something else has put there, where the source gives a checksum that it has."""
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
        self._note(file)
        return True

    def partial_path(self, file: RemoteFile) -> Path:
        name = hashlib.sha256(file.path.encode()).hexdigest()[:32]
        return self.folder / STATE_FOLDER / PARTS / f"{name}{SUFFIX}"

    def put(self, file: RemoteFile, whole: Path) -> None:
        path = self.folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(self.folder.resolve()):
            raise invalid("download_dir", f"{path.parent} is a link that leads out of {self.folder}")
        whole.replace(path)
        self._note(file)

    def complete(self, wanted: Sequence[RemoteFile]) -> bool:
        """Whether a download has put all of these files there, and nothing has changed them."""
        manifest = read_manifest(self.folder)
        if not manifest:
            return False
        self._manifest = manifest
        known = {file.path: file.identity for file in manifest.listing}
        return all(known.get(file.path) == file.identity and self.has(file) for file in wanted)

    def forget(self, files: Sequence[RemoteFile]) -> None:
        """Take files as not fetched. Raises ``OSError``."""
        for file in files:
            self._manifest.done.pop(file.path, None)
        write_manifest(self.folder, self._manifest)

    def _begin(self, source: str, listing: Listing, wanted: Sequence[RemoteFile]) -> None:
        known = read_manifest(self.folder) or Manifest(source, [], [])
        now = {file.path: file.identity for file in listing.files}
        if known.source != source:
            if double := known.done.keys() & {file.path for file in wanted}:
                words = f"{self.folder} has {min(double)} of {known.source} already: name another folder"
                raise invalid("download_dir", words)
            known = Manifest(source, [], [])
        for path in known.done.keys() - now.keys():
            self._remove(path, known.done[path])
        before = {file.path: file.identity for file in known.listing}
        done = {path: time for path, time in known.done.items() if path in now and before.get(path) == now[path]}
        self._manifest = Manifest(source, list(listing.files), [file.path for file in wanted], done)
        write_manifest(self.folder, self._manifest)

    def _remove(self, path: str, time: int) -> None:
        """Delete a file that was fetched, unless something else has changed it since."""
        place = self.folder / path
        if place.parent.resolve().is_relative_to(self.folder.resolve()):
            with suppress(OSError):
                if place.stat().st_mtime_ns == time:
                    place.unlink()

    def _note(self, file: RemoteFile) -> None:
        self._manifest.done[file.path] = (self.folder / file.path).stat().st_mtime_ns
        write_manifest(self.folder, self._manifest)
