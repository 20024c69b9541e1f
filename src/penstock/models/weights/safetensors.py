"""Tensors of a checkpoint in memory-mapped safetensors files, one or several shards."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight
from penstock.planning.checkpoint_digest import INDEX, checkpoint_digest
from penstock.quant import CheckpointFormat

SINGLE = "model.safetensors"


class Checkpoint:
    """The safetensors files of a folder. Nothing is read before it is taken.

    Args:
        format: of its quantized matrices; None where it has none.

    Raises ``PenstockError`` (``invalid``) where files are missing or damaged, or where there are only pickles, which
    are never loaded.
    """

    def __init__(self, folder: Path, format: CheckpointFormat | None = None) -> None:
        self._folder = folder
        self._format = format
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self.bytes_read = 0
        """Bytes of all tensors and slices taken so far."""
        if (folder / INDEX).exists():
            self._file_of = _read_index(folder / INDEX)
            if missing := {file for file in self._file_of.values() if not (folder / file).is_file()}:
                raise invalid("model", f"{folder} lacks {', '.join(sorted(missing))}, which its index names")
        elif (folder / SINGLE).exists():
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        elif pickles := [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]:
            raise invalid(
                "model",
                f"{folder} has weights only as pickles ({pickles[0].name}), which can run code and are not loaded. "
                "Convert them to safetensors first.",
            )
        else:
            raise invalid("model", f"{folder} has no {SINGLE}")
        self._unprefixed = "embed_tokens.weight" in self._file_of

    @cached_property
    def version(self) -> str:
        return checkpoint_digest(self._folder)

    @property
    def state(self) -> str:
        """Identifies the files of this machine by ``config.json``, the index, and names, headers, sizes and times.

        A copy of the files has another state; changed weights always have. The time of the last status change
        (``ctime``) is included, because tools that copy files set the time of modification back.
        """
        digest = hashlib.sha256()
        for name in ("config.json", INDEX):
            if (path := self._folder / name).exists():
                digest.update(path.read_bytes())
        for file in sorted(self._folder.glob("*.safetensors")):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
            with file.open("rb") as content:
                length = int.from_bytes(content.read(8), "little")
                digest.update(content.read(min(length, status.st_size)))
        return digest.hexdigest()

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """As ``layers.Weights.read``. Only the pages of the file that hold the rows are read, when they are used.

        A checkpoint of the decoder alone, as embedding models are saved, has names without ``model.`` before them.
        """
        name = self._stored_name(name)
        if name not in self._file_of:
            raise invalid("model", f"{self._folder} has no tensor {name}")
        try:
            file = self._open(self._file_of[name])
            stored = file.get_slice(name)
            if (stored_shape := tuple(stored.get_shape())) != shape:
                raise invalid("model", f"tensor {name} has shape {stored_shape}, config.json wants {shape}")
            some = rows if rows and rows != (0, shape[0]) else None
            tensor: Tensor = stored[some[0] : some[1]] if some else file.get_tensor(name)
        except SafetensorError as error:
            raise self._damaged(self._file_of[name], error) from error
        if not as_stored and not (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
            words = "and 16-bit or 32-bit floating-point numbers are wanted"
            raise invalid("model", f"tensor {name} is of {tensor.dtype}, {words}")
        self.bytes_read += tensor.nbytes
        return tensor

    def has(self, name: str) -> bool:
        return self._stored_name(name) in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """As ``quant.TensorSource.shape``."""
        stored = self._stored_name(name)
        if stored not in self._file_of:
            raise invalid("model", f"{self._folder} has no tensor {stored}")
        try:
            return tuple(self._open(self._file_of[stored]).get_slice(stored).get_shape())
        except SafetensorError as error:
            raise self._damaged(self._file_of[stored], error) from error

    def format_of(self, name: str) -> Format:
        """As ``layers.Weights.format_of``."""
        return self._format.format_of(self, name) if self._format else UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        """As ``layers.Weights.read_quantized``."""
        assert self._format
        return self._format.read(self, name, outputs, inputs, rows)

    def _stored_name(self, name: str) -> str:
        return name.removeprefix("model.") if self._unprefixed else name

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
        return self._files[file]

    def _damaged(self, file: str, error: Exception) -> Exception:
        return invalid("model", f"{self._folder / file} is damaged ({error}). Fetch it again.")


class Index(msgspec.Struct):
    """``model.safetensors.index.json`` of a checkpoint in shards."""

    weight_map: dict[str, str]
    """The file of each tensor."""


def _read_index(path: Path) -> dict[str, str]:
    try:
        files = msgspec.json.decode(path.read_bytes(), type=Index).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid("model", f"{path} is damaged ({error}). Fetch it again.") from error
    if outside := next((file for file in files.values() if Path(file).name != file), None):
        raise invalid("model", f"{path} names {outside!r}, which is not a file beside it")
    return files
