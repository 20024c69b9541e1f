"""Writer of one rank's weights in an engine folder. It writes file by file, to keep few weights in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from penstock.checkpoint.engine_config import EngineConfig, rank_folder, shard_name
from penstock.core.quantization import Format
from penstock.layers import Weights

from ..output_folder import locked, new_file, sync_folder
from .engine_weights import TENSOR, open_regular, shard_state
from .packed_file import PackedFile, PackedLayout, verifiers


class EngineOutput:
    """``layers.PackedOutput``: writes a rank's weights to files, in build order.

    A file gets its name when it is complete and on disk, and complete files of the same build are kept. An interrupted
    build therefore continues where it stopped, and writes the same bytes.

    Args:
        rank: index of the rank's folder.
        weights: weights of the checkpoint, for the formats of quantized matrices.
        progress: called with the number of bytes that were packed, or found in complete files.
    """

    def __init__(
        self, folder: Path, config: EngineConfig, rank: int, weights: Weights, progress: Callable[[int], None]
    ) -> None:
        self._folder = rank_folder(folder, rank)
        self._max_bytes = config.max_shard_size
        self._weights = weights
        self._progress = progress
        self._state = shard_state(config, rank)
        self._done: set[str] = set()
        """Names of the matrices and tensors in complete files."""
        self._matrices: dict[str, dict[str, Tensor]] = {}
        """Matrices for the next file."""
        self._bytes = 0
        self._count = 0
        self._folder.mkdir(exist_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager around all calls of ``add``. If another process writes to the folder, waits for its end."""
        with locked(self._folder):
            self._keep_complete_files()
            yield
            self._write_file()

    def has(self, name: str) -> bool:
        """Whether a matrix or tensor was added, in this or an interrupted build."""
        return name in self._done or name in self._matrices

    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Add a packed matrix."""
        if self.has(name):
            return
        self._matrices[name] = tensors
        added = sum(tensor.nbytes for tensor in tensors.values())
        self._bytes += added
        self._progress(added)
        if self._bytes >= self._max_bytes:
            self._write_file()

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add this rank's rows of an unpacked tensor."""
        self.add(name, {TENSOR: tensor})

    def _keep_complete_files(self) -> None:
        """Find the complete files of this build, up to the first missing or damaged file. Delete other files."""
        kept = set()
        while (path := self._folder / shard_name(self._count)).exists() and (names := self._read(path)):
            self._done |= names
            kept.add(path)
            self._count += 1
        for path in self._folder.glob(shard_name(0).replace("00000", "*") + "*"):
            if path not in kept:
                path.unlink()

    def _read(self, path: Path) -> set[str]:
        """Names of matrices and tensors in a file; empty if the file is incomplete, damaged, or of another build."""
        threads = verifiers()
        try:
            with open_regular(path) as file:
                found = PackedFile(file, threads, self._state)
            if any(found.damaged(name) for name in found.tensors):
                return set()
        except (OSError, ValueError):
            return set()
        finally:
            threads.shutdown(wait=False)
        self._progress(found.header.size if found.tensors else 0)
        return set(found.tensors)

    def _write_file(self) -> None:
        if not self._matrices:
            return
        layout = PackedLayout(self._matrices, self._state, self._stored_formats())
        with new_file(self._folder / shard_name(self._count)) as part, part.open("wb") as file:
            file.truncate(layout.size)
            layout.write(file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)
        self._done |= self._matrices.keys()
        self._matrices, self._bytes, self._count = {}, 0, self._count + 1

    def _stored_formats(self) -> dict[str, Format]:
        keys = [key for key, tensors in self._matrices.items() if TENSOR not in tensors]
        names = [name for key in keys for name in key.split("+")]
        formats = {name: self._weights.format_of(name) for name in names}
        return {name: format for name, format in formats.items() if format.bits}
