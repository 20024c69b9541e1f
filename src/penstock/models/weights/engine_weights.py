"""Reader of the weights in an engine folder. Its files are mapped."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import Executor
from pathlib import Path
from typing import IO

from torch import Tensor

from penstock.checkpoint.engine_config import EngineConfig, rank_folder, shard_name
from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight

from .packed_file import PackedFile, verifiers

TENSOR = ""
"""Tensor name of an unpacked weight: a norm, a bias, or a matrix that the backend does not pack."""


def shard_state(config: EngineConfig, rank: int) -> str:
    """``Header.state`` of a rank's files: a hash of everything that the contents of the files depend on."""
    parts = config.producer, config.layout, config.weights_version, config.dtype, config.quantization
    sizes = (
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        config.layers,
        config.mtp,
        config.max_shard_size,
        rank,
    )
    return hashlib.sha256(repr((parts, sizes)).encode()).hexdigest()


class EngineWeights:
    """One rank's weights in an engine folder, as both ``layers.Weights`` and ``layers.PackedWeights``.

    Processes that map the same files share their pages. Threads verify each tensor before it is used.

    Args:
        stage: pipeline stage of the rank.
        rank: rank in its tensor-parallel group.

    Raises ``PenstockError`` (``invalid``) for missing or damaged files, or files of another build.
    """

    def __init__(self, folder: Path, config: EngineConfig, stage: int, rank: int) -> None:
        number = stage * config.tensor_parallel_size + rank
        self.version = config.weights_version
        self._config = config
        self._folder = rank_folder(folder, number)
        self._files: dict[str, PackedFile] = {}
        """Name of a packed matrix or tensor → its file."""
        self._formats: dict[str, Format] = {}
        self.mapped_bytes = 0
        state, threads, count = shard_state(config, number), verifiers(), 0
        try:
            while (path := self._folder / shard_name(count)).exists():
                self._open(path, state, threads)
                count += 1
        finally:
            threads.shutdown(wait=False)
        if not count:
            raise self._broken(f"{self._folder} is missing or empty")

    def _open(self, path: Path, state: str, threads: Executor) -> None:
        try:
            with open_regular(path) as file:
                found = PackedFile(file, threads, state)
        except (OSError, ValueError) as error:
            raise self._broken(f"{path} cannot be used ({error})") from error
        if found.header.state != state:
            raise self._broken(f"{path} and {self._folder.parent / 'config.json'} are from different builds")
        self._files |= dict.fromkeys(found.tensors, found)
        self._formats |= found.header.formats
        self.mapped_bytes += found.header.size

    def find(self, name: str) -> dict[str, Tensor] | None:
        """See ``layers.PackedWeights.find``. Raises ``PenstockError`` (``invalid``) if the matrix is damaged."""
        if (file := self._files.get(name)) is None:
            return None
        if file.damaged(name):
            raise self._broken(f"{name} in {self._folder} is damaged")
        return file.tensors[name]

    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Do nothing: a matrix that is unpacked in the folder is packed at each start."""

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """See ``layers.Weights.read``. The folder only has this rank's rows."""
        found, (first, end) = self.find(name), rows or (0, shape[0])
        if found is None:
            raise self._broken(f"{self._folder} lacks {name}")
        if tuple(found[TENSOR].shape) != (end - first, *shape[1:]):
            expected = (end - first, *shape[1:])
            raise self._broken(f"{name} in {self._folder} has shape {tuple(found[TENSOR].shape)}, not {expected}")
        return found[TENSOR]

    def has(self, name: str) -> bool:
        return name in self._files

    def format_of(self, name: str) -> Format:
        """Format of a matrix in the checkpoint; ``UNQUANTIZED`` if it was not quantized."""
        return self._formats.get(name, UNQUANTIZED)

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight:
        raise self._broken(f"{self._folder} lacks {name}")

    def _broken(self, problem: str) -> Exception:
        checkpoint = self._config.checkpoint
        return invalid("model", f"{problem}: run the same penstock build again (from the checkpoint {checkpoint})")


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises ``OSError`` for other files, without waiting for a FIFO's writer."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file
