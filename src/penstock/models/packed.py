"""Packed matrices of a checkpoint on disk, so that the next start need not round and pack them again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import shutil
import threading
from math import prod
from pathlib import Path

import msgspec
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

HUGE = 2 * 2**20
"""Bytes of a huge page. What is as large begins at one, so that it is mapped in whole ones where the system can."""
LINE = 64
"""Bytes of a cache line, where all else begins."""
POPULATE_READ = 22
"""To ``madvise`` (Linux 5.14): have all of it read and mapped now, not in the first step."""
ROOM = 2
"""How often a disk must have room for what is written to it."""


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

    What was kept of another state of the checkpoint (other headers, sizes or times of its files) is not found, and is
    replaced. What is found is mapped, not read: engines on one machine share it, and it takes no time to copy.
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
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("%s is damaged (%s) and is made again", self._path, error)

    def find(self, name: str) -> dict[str, Tensor] | None:
        """What was kept under a name, or nothing."""
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
            threading.Thread(target=self._save, name="keep-weights").start()

    def _map(self) -> dict[str, dict[str, Tensor]]:
        """What lies in the file, if it is of the checkpoint's state."""
        with self._path.open("rb") as file:
            header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")), type=Header)
            start = _up(file.tell(), HUGE)
            if header.state != self._state:
                return {}
            if os.fstat(file.fileno()).st_size != start + header.size:
                raise ValueError("not of its full length")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # a tensor of what is read only warns of it
        with contextlib.suppress(OSError, AttributeError):  # of systems without
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(POPULATE_READ)

        def tensor(place: Place) -> Tensor:
            dtype = getattr(torch, place.dtype)
            count = prod(place.shape)
            return torch.frombuffer(memory, dtype=dtype, count=count, offset=start + place.at).view(place.shape)

        found = {name: {key: tensor(place) for key, place in places.items()} for name, places in header.places.items()}
        self.mapped_bytes = header.size
        return found

    def _save(self) -> None:
        written = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._clean()
            self._write(written)
            os.replace(written, self._path)
            logger.info("packed weights are kept for the next start in %s", self._path)
        except OSError as error:
            logger.info("packed weights are not kept for the next start: %s", error)
            with contextlib.suppress(OSError):
                written.unlink()
        self._added = {}

    def _clean(self) -> None:
        """Take away what processes left that were killed while they wrote."""
        for left in self._path.parent.glob(f"{self._path.stem}.[0-9]*"):
            if not Path("/proc", left.suffix[1:]).exists():
                left.unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        at = 0
        places: dict[str, dict[str, Place]] = {}
        for name, tensors in self._added.items():
            places[name] = {}
            for key, tensor in tensors.items():
                at = _up(at, HUGE if tensor.nbytes >= HUGE else LINE)
                places[name][key] = Place(at, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                at += tensor.nbytes
        if shutil.disk_usage(path.parent).free < ROOM * at:
            raise OSError(f"{path.parent} has less room than {ROOM} times their {at / 1e9:.1f} GB")
        header = msgspec.json.encode(Header(self._state, at, places))
        start = _up(8 + len(header), HUGE)
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name, tensors in self._added.items():
                for key, tensor in tensors.items():
                    file.seek(start + places[name][key].at)
                    file.write(tensor.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())  # or a name might outlive, through a loss of power, what it is of


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _state(checkpoint: Path) -> str:
    """Of the files with weights: names, sizes, times and headers."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} ".encode())
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            digest.update(content.read(min(length, status.st_size)))
    return digest.hexdigest()
