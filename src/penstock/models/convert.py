"""Conversion of checkpoints to safetensors, with another shard size or dtype. An engine folder can be converted back to
a checkpoint if its weights were not rounded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint.checkpoint_digest import checkpoint_digest
from penstock.checkpoint.config_json import read_plain_config_json
from penstock.checkpoint.engine_config import model_config, read_engine_config
from penstock.checkpoint.stored_format import quantization_config_of
from penstock.checkpoint.stored_tensors import INDEX, plan_shards
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .engine_source import EngineSource
from .output_folder import OutputFolder, new_file, sync_folder, write_atomically
from .weights import Checkpoint, find_gguf

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtype names in safetensors."""
STATE_KEY = "penstock_convert"
"""Key in a file's metadata; its value is a hash of everything that the file depends on."""
CHUNK = 2**26
"""Maximum number of bytes of a tensor that are converted at a time."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Sink = Callable[[str, int, Tensor], None]
"""Function that receives rows of a tensor. Arguments: tensor name, index of the first row, and the rows as stored."""


class Source(Protocol):
    """Interface of sources of tensors."""

    def describe(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor by name, in a fixed order."""
        ...

    def read(self, names: Collection[str], sink: Sink) -> None:
        """Pass the tensors ``names`` to the sink, in chunks of rows."""
        ...


class CheckpointSource:
    """A ``Source``: all tensors of a checkpoint as stored, including the tensors of quantized matrices."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def describe(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        tensors = {(name := self._checkpoint.stored_name(each)): self._tensor(name) for each in self._checkpoint.names}
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def read(self, names: Collection[str], sink: Sink) -> None:
        for name in names:
            sink(name, 0, self._tensor(name))

    def _tensor(self, name: str) -> Tensor:
        return self._checkpoint.read(name, *self._checkpoint.shape(name), as_stored=True)  # a view of the mapped file


@dataclass(frozen=True)
class Shard:
    """A file of the output."""

    name: str
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Dtype and shape of each tensor in file order: larger items first, so that all tensors are aligned."""
    state: str
    """Hash of everything that the file depends on."""

    @property
    def sizes(self) -> dict[str, int]:
        return {name: dtype.itemsize * prod(shape) for name, (dtype, shape) in self.tensors.items()}

    def layout(self) -> tuple[bytes, dict[str, int]]:
        """The header of the file, and the byte offset of each tensor in the file."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", STATE_KEY: self.state}}
        at, sizes, offsets = 0, self.sizes, {}
        for name, (dtype, shape) in self.tensors.items():
            offsets[name] = at
            entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (at, at := at + sizes[name])}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header = text.ljust(-(-len(text) // 8) * 8)
        start = 8 + len(header)
        return len(header).to_bytes(8, "little") + header, {name: start + offset for name, offset in offsets.items()}

    def is_whole(self, path: Path) -> bool:
        """Whether a file has this header and size. Its data is then complete: only complete files get this name."""
        header, _ = self.layout()
        try:
            with path.open("rb") as file:
                return (
                    path.stat().st_size == len(header) + sum(self.sizes.values()) and file.read(len(header)) == header
                )
        except OSError:
            return False


def convert(
    folder: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a safetensors checkpoint. The same arguments give the same bytes. Complete files of an interrupted run are
    kept.

    Args:
        folder: a checkpoint with safetensors or PyTorch files, or an engine folder that is not quantized.
        dtype: dtype of floating-point tensors that are not part of a quantized matrix; None: unchanged.
        max_shard_size: maximum bytes of a file with more than one tensor.
        progress: called with the number of bytes written so far, and the total number of bytes.

    Returns:
        The number of files.

    Raises ``PenstockError`` if the checkpoint is broken, an engine folder cannot be converted back, or a value exceeds
    the range of ``dtype``.
    """
    config = read_plain_config_json(folder)
    quantized = bool(quantization_config_of(config))
    source: Source
    if built := read_engine_config(folder):
        source, dtype = EngineSource(folder, built), dtype or getattr(torch, built.dtype)
    elif find_gguf(folder):
        message = f"{folder} has a GGUF file, which cannot be converted: serve or build it without conversion"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    else:
        source = CheckpointSource(Checkpoint(folder))
    found = source.describe()
    described = {
        name: (_target(name, stored, None if quantized and _is_part(name, found) else dtype), shape)
        for name, (stored, shape) in found.items()
    }
    state = checkpoint_digest(folder), str(dtype), max_shard_size, bool(built), 1
    shards = _plan(described, max_shard_size, sha256(repr(state).encode()).hexdigest())
    config = model_config(config)
    if dtype:
        fields = [field for field in ("dtype", "torch_dtype") if field in config] or ["dtype"]
        config |= dict.fromkeys(fields, str(dtype).removeprefix("torch."))
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    names = {shard.name for shard in shards} | ({INDEX} if len(shards) > 1 else set())
    total = sum(sum(shard.sizes.values()) for shard in shards)
    with OutputFolder(output, folder, text, _is_converted).filling(names):
        done = 0

        def add(size: int) -> None:
            nonlocal done
            progress(done := done + size, total)

        for shard in shards:
            if shard.is_whole(output / shard.name):
                add(sum(shard.sizes.values()))
            else:
                _write(source, shard, output / shard.name, add)
        if len(shards) > 1:
            weight_map = {name: shard.name for shard in shards for name in shard.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_atomically(output / INDEX, (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())
    return len(shards)


def _target(name: str, stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    if stored not in NAMES:
        raise invalid("model", f"tensor {name} has dtype {stored}, which safetensors does not support")
    return dtype if dtype and stored in FLOATS else stored


def _is_part(name: str, names: Collection[str]) -> bool:
    """Whether a tensor is part of a quantized matrix: scales, zero points, or weights, which bitsandbytes may store as
    bytes in a floating-point dtype."""
    return not name.endswith((".weight", ".bias")) or f"{name}.absmax" in names


def _plan(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: int, state: str) -> list[Shard]:
    sizes = {name: dtype.itemsize * prod(shape) for name, (dtype, shape) in tensors.items()}
    return [
        Shard(file, {name: tensors[name] for name in sorted(names, key=lambda n: (-tensors[n][0].itemsize, n))}, state)
        for file, names in plan_shards(sizes, max_bytes).items()
    ]


def _write(source: Source, shard: Shard, path: Path, progress: Callable[[int], None]) -> None:
    header, offsets = shard.layout()
    with new_file(path) as part, part.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(shard.sizes.values()))

        def write_rows(name: str, first: int, rows: Tensor) -> None:
            dtype, shape = shard.tensors[name]
            row_bytes = dtype.itemsize * prod(shape[1:])
            file.seek(offsets[name] + first * row_bytes)
            for chunk in rows.split(max(CHUNK // row_bytes, 1)) if rows.dim() and row_bytes else [rows]:
                file.write(_bytes(_converted(name, chunk, dtype)))
                progress(chunk.numel() * dtype.itemsize)

        source.read(shard.tensors, write_rows)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is dtype:
        return tensor
    result = tensor.to(dtype)
    narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if narrower and (result.isinf() & tensor.isfinite()).any():
        found, target = float(tensor[tensor.isfinite()].abs().max()), str(dtype).removeprefix("torch.")
        message = f"tensor {name} has values up to {found:.3g}, beyond the range of {target}: use bfloat16 or float32"
        raise invalid("dtype", message)
    return result


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _is_converted(folder: Path) -> bool:
    """Whether a folder was written by ``convert``."""
    try:
        with safe_open(next(folder.glob("model*.safetensors")), framework="pt") as file:
            return STATE_KEY in (file.metadata() or {})
    except (StopIteration, OSError, SafetensorError):
        return False
