"""Readers of files with tensors: safetensors files, and PyTorch files with the weights-only unpickler."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import invalid


class TensorFile(Protocol):
    """Interface of files with tensors. Methods raise ``PenstockError`` (``invalid``) for damaged files."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Read a tensor, or a range (first, end) of its rows. The file is mapped: its pages are read on first use."""
        ...


def open_tensors(path: Path) -> TensorFile:
    """Map a file. Raises ``PenstockError`` (``invalid``) if the file is damaged, or has objects other than tensors,
    which could run code."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PyTorchFile(path)


class SafetensorsFile:
    """A ``TensorFile`` in safetensors format."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error

    def names(self) -> Iterable[str]:
        names: Iterable[str] = self._file.keys()
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        try:
            return tuple(self._file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise _damaged(self._path, error) from error

    def read(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        try:
            tensor: Tensor = self._file.get_slice(name)[rows[0] : rows[1]] if rows else self._file.get_tensor(name)
        except SafetensorError as error:
            raise _damaged(self._path, error) from error
        return tensor


class PyTorchFile:
    """A ``TensorFile`` written by ``torch.save``. PyTorch's weights-only unpickler only creates tensors and plain
    containers, and never runs code from the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged file may cause any exception
            raise _refused(path, error) from error
        named = content.items() if isinstance(content, dict) else ()
        self._tensors: dict[str, Tensor] = {name: value.detach() for name, value in named if _is_plain(value)}

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._get(name).shape)

    def read(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        tensor = self._get(name)
        return tensor[rows[0] : rows[1]] if rows else tensor

    def _get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise invalid("model", f"{self._path} lacks tensor {name}, which the index lists: download the file again")
        return self._tensors[name]


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _refused(path: Path, error: Exception) -> Exception:
    """The error for a file that the weights-only unpickler does not load."""
    if not is_zipfile(path):
        message = f"{path} is damaged, or a pickle from before PyTorch 1.6, which is not loaded"
    elif found := re.search(r"GLOBAL ([\w.]{1,100})", str(error)):
        message = f"{path} is not loaded, because its pickle would run {found[1]}"
    else:
        message = f"{path} is damaged, or has objects other than tensors, and is not loaded ({type(error).__name__})"
    return invalid("model", f"{message}. Convert the file to safetensors where it was created.")


def _damaged(path: Path, error: Exception) -> Exception:
    return invalid("model", f"{path} is damaged ({error}): download the file again")
