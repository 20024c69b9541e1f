"""Tensors of a checkpoint: memory-mapped safetensors, whole or in shards, or made up for benchmarks."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import invalid

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """The safetensors files of a folder. Nothing is read before it is taken.

    Raises ``PenstockError`` (``invalid``) where files are missing or damaged, or where there are only pickles, which
    are never loaded.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
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

        self._bare = "embed_tokens.weight" in self._file_of

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name, which must have that shape, in its own dtype.

        A checkpoint of the decoder alone, as embedding models are saved, has names without ``model.`` before them.
        """
        if self._bare:
            name = name.removeprefix("model.")
        if name not in self._file_of:
            raise invalid("model", f"{self._folder} has no tensor {name}")
        try:
            tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise self._damaged(self._file_of[name], error) from error
        if tuple(tensor.shape) != shape:
            raise invalid("model", f"tensor {name} has shape {tuple(tensor.shape)}, config.json wants {shape}")
        if not tensor.is_floating_point():
            raise invalid("model", f"tensor {name} is of {tensor.dtype}, and only floating-point weights are read")
        return tensor

    def has(self, name: str) -> bool:
        return name in self._file_of

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
    """Of a checkpoint in shards."""

    weight_map: dict[str, str]
    """The file of each tensor."""


def _read_index(path: Path) -> dict[str, str]:
    try:
        files = msgspec.json.decode(path.read_bytes(), type=Index).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid("model", f"{path} is damaged ({error}). Fetch it again.") from error
    if outside := next((file for file in files.values() if Path(file).name != file), None):
        raise invalid("model", f"{path} names {outside!r}, which is no file beside it")
    return files


class Dummy:
    """Random weights of any shape, the same for the same name and seed (``--load-format dummy``)."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self._dtype = dtype
        self._seed = seed

    def take(self, name: str, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._seed)
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype)
        return torch.empty(shape, dtype=self._dtype).normal_(std=shape[-1] ** -0.5, generator=generator)

    def has(self, name: str) -> bool:
        return True
