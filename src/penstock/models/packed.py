"""Packed matrices of a checkpoint on disk, so that the next start need not round and pack them again."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

import msgspec
import torch
from torch import Tensor

from penstock.ops import pages

logger = logging.getLogger(__name__)

UNFINISHED = ".part"
"""Ends the names of files that are still being written, which who writes them has locked."""
LINE = 64
"""Bytes of a cache line, where tensors begin; those as large as a huge page begin with one, to be mapped as such."""
ROOM = 2
"""How often a disk must have room for what is written to it."""
PATIENCE = 8.0
"""Seconds that a process which ends waits for what it still writes; then it is left unfinished."""


def cache_folder(name: str) -> Path | None:
    """Where packed matrices are kept: a folder by name, for no name that of this user, for ``none`` nowhere."""
    if name == "none":
        return None
    return Path(name) if name else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


class Place(msgspec.Struct, frozen=True):
    """Where a tensor lies."""

    at: int
    """Bytes after the header, which takes whole huge pages."""
    dtype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True):
    """A file begins with its length, 8 bytes, the least first, and this as JSON."""

    state: str
    """Of the checkpoint."""
    size: int
    """Of the file, in bytes, without the header."""
    places: dict[str, dict[str, Place]]
    """By the matrix's name and the tensor's."""


class Packed:
    """The matrices of one checkpoint in one form, in one file of a cache.

    Args:
        form: all that decides the bytes of a packed matrix besides the checkpoint.

    What was kept of another state of the checkpoint (another configuration; other headers, sizes or times of its files)
    is not found, and is replaced. What is found is mapped, not read: engines on one machine share it, and nothing needs
    to be copied.
    """

    def __init__(self, cache: Path, checkpoint: Path, form: str) -> None:
        place = hashlib.sha256(f"{checkpoint.resolve()} {form}".encode()).hexdigest()[:32]
        self._path = cache / f"{place}.packed"
        self._state = _state(checkpoint)
        self._added: dict[str, dict[str, Tensor]] = {}
        self._found: dict[str, dict[str, Tensor]] = {}
        self.mapped_bytes = 0
        """Of what was found."""
        try:
            self._found = self._map()
        except FileNotFoundError:
            pass
        except Exception as error:  # a cache keeps no engine from starting
            logger.warning("%s cannot be used (%s) and is made again", self._path, error)

    def find(self, name: str) -> dict[str, Tensor] | None:
        """What was kept under a name, or nothing. It is read only."""
        return self._found.get(name)

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        """For ``save``."""
        if tensors:
            self._added[name] = tensors

    def save(self) -> None:
        """Write what was kept, if there was anything to keep, while the start goes on.

        Where the disk does not take it, the log says so.
        """
        if self._added:
            thread = threading.Thread(target=self._save, name="keep-weights", daemon=True)
            thread.start()
            atexit.register(thread.join, PATIENCE)

    def _map(self) -> dict[str, dict[str, Tensor]]:
        """What lies in the file, if it is of the checkpoint's state."""
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = msgspec.json.decode(file.read(min(int.from_bytes(file.read(8), "little"), size)), type=Header)
            start = _up(file.tell(), pages.HUGE)
            if header.state != self._state:
                return {}
            if size != start + header.size:
                raise ValueError("not of its full length")
            memory = pages.mapped(file)

        def tensor(place: Place) -> Tensor:
            dtype = getattr(torch, place.dtype)
            own = memory[start + place.at :][: prod(place.shape) * dtype.itemsize]
            return own.view(dtype).view(place.shape)

        found = {name: {key: tensor(at) for key, at in own.items()} for name, own in header.places.items()}
        self.mapped_bytes = header.size
        return found

    def _save(self) -> None:
        try:
            folder = self._path.parent
            folder.mkdir(parents=True, exist_ok=True)
            _clean(folder)
            with NamedTemporaryFile(dir=folder, prefix=f"{self._path.stem}.", suffix=UNFINISHED) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._write(file)
                os.link(file.name, written := file.name + UNFINISHED)
                os.replace(written, self._path)
            logger.debug("packed weights are kept for the next start in %s", self._path)
        except Exception as error:
            logger.info("packed weights are not kept for the next start: %s", error)
        self._added = {}

    def _write(self, file: IO[bytes]) -> None:
        kept = self._found | self._added
        tensors = {(name, key): tensor for name, own in kept.items() for key, tensor in own.items()}
        at = 0
        places: dict[str, dict[str, Place]] = {name: {} for name in kept}
        for (name, key), tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
            at = _up(at, pages.HUGE if tensor.nbytes >= pages.HUGE else LINE)
            places[name][key] = Place(at, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            at += tensor.nbytes
        if shutil.disk_usage(self._path.parent).free < ROOM * at:
            raise OSError(f"{self._path.parent} has less room than {ROOM} times their {at / 1e9:.1f} GB")
        header = msgspec.json.encode(Header(self._state, at, places))
        start = _up(8 + len(header), pages.HUGE)
        file.write(len(header).to_bytes(8, "little") + header)
        for (name, key), tensor in tensors.items():
            file.seek(start + places[name][key].at)
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())  # or a name might outlive, through a loss of power, what it is of


def _clean(folder: Path) -> None:
    """Take away what processes left that ended while they wrote."""
    for left in folder.glob(f"*{UNFINISHED}"):
        with contextlib.suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _state(checkpoint: Path) -> str:
    """Of a checkpoint: its configuration, and its files' names, sizes, times and headers."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} ".encode())
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            digest.update(content.read(min(length, status.st_size)))
    return digest.hexdigest()
