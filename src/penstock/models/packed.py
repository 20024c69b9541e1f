"""Packed matrices of a checkpoint on disk, so that the next start need not round and pack them again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

logger = logging.getLogger(__name__)


def cache_folder(name: str) -> Path | None:
    """Where packed matrices are kept: a folder by name, for no name that of this user, for ``none`` nowhere."""
    if name == "none":
        return None
    return Path(name) if name else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


class Packed:
    """The matrices of one checkpoint in one form, in one file of a cache.

    Args:
        form: all that decides the bytes of a packed matrix besides the checkpoint.

    What was kept of another state of the checkpoint (other headers, sizes or times of its files) is not found, and is
    replaced.
    """

    def __init__(self, cache: Path, checkpoint: Path, form: str) -> None:
        place = hashlib.sha256(f"{checkpoint.resolve()} {form}".encode()).hexdigest()[:32]
        self._path = cache / f"{place}.safetensors"
        self._state = _state(checkpoint)
        self._added: dict[str, Tensor] = {}
        self._file: Any = None
        self._names: dict[str, list[str]] = defaultdict(list)
        if self._path.exists():
            try:
                file: Any = safe_open(self._path, framework="pt")
                if (file.metadata() or {}).get("state") == self._state:
                    self._file = file
                    for key in list(file.keys()):
                        name, _, part = key.rpartition("/")
                        self._names[name].append(part)
            except (SafetensorError, OSError) as error:
                logger.warning("%s is damaged (%s) and is made again", self._path, error)

    def find(self, name: str) -> dict[str, Tensor] | None:
        """What was kept under a name, memory-mapped, or nothing."""
        if self._file is None:
            return None
        names = self._names.get(name, [])
        return {key: self._file.get_tensor(f"{name}/{key}") for key in names} or None

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        """For ``save``."""
        self._added |= {f"{name}/{key}": tensor for key, tensor in tensors.items()}

    def save(self) -> None:
        """Write what was kept, if there was anything to keep. Where the disk does not take it, the log says so."""
        if not self._added:
            return
        written = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self._added, written, {"state": self._state})
            os.replace(written, self._path)
            logger.info("rounded weights are kept for the next start in %s", self._path)
        except (SafetensorError, OSError) as error:
            logger.warning("packed weights were not kept for the next start: %s", error)
            with contextlib.suppress(OSError):
                written.unlink()
        self._added = {}


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
