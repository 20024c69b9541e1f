"""Metadata and tensors of a model in a GGUF file. Every value is checked when it is read."""

from __future__ import annotations

import math
import mmap
from functools import cached_property

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .gguf_file import GGUFFile, GGUFTensor

MAX_SIZE = 2**24
"""Maximum value of every size in the metadata, including the context length."""


def tensors_of(files: list[GGUFFile]) -> dict[str, GGUFTensor]:
    """The tensors of all parts of a model by name.

    Raises ``PenstockError`` (``invalid``) for duplicate tensors or missing parts.
    """
    tensors: dict[str, GGUFTensor] = {}
    for file in files:
        if double := tensors.keys() & file.tensors.keys():
            raise invalid("model", f"{file.path} has tensor {min(double)!r}, but an earlier part also has it")
        tensors |= file.tensors
    if (count := max(files[0].get("split.count", int, 1), 1)) != len(files):  # gguf-split --merge writes 0
        message = f"{files[0].path} is one of {count} parts of a model, but {len(files)} were found"
        raise invalid("model", f"{message}: name the files as llama.cpp does, -00001-of-{count:05}.gguf")
    return tensors


class Metadata:
    """Metadata of the file's architecture (keys with its prefix), and the tensors of all parts.

    Raises ``PenstockError``: ``unsupported`` for a file without a model; ``invalid`` for parts that do not match.
    """

    def __init__(self, files: list[GGUFFile]) -> None:
        self.file = files[0]
        if (kind := self.file.get("general.type", str, "model")) != "model":
            message = f"{self.file.path} has general.type {kind!r}; name a file with a model"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        self.architecture: str = self.file.require("general.architecture", str)
        self.tensors = tensors_of(files)
        self._files = files
        self._read: set[str] = set()

    @cached_property
    def mtp_layers(self) -> int:
        """Number of multi-token prediction layers, which follow the decoder's layers; 0 if the file lacks them."""
        named, all_layers = self.size("nextn_predict_layers", 0), self.size("block_count")
        if named >= all_layers:
            message = f"nextn_predict_layers is {named}; it must be less than block_count, {all_layers}"
            raise invalid("model", f"{self.file.path}: {message}")
        return named if f"blk.{all_layers - named}.nextn.eh_proj.weight" in self.tensors else 0

    @cached_property
    def layers(self) -> int:
        """Number of layers, including ``mtp_layers``."""
        return self.size("block_count") - self.size("nextn_predict_layers", 0) + self.mtp_layers

    @property
    def head_dim(self) -> int:
        """Elements per head of a key."""
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        return self.size("attention.key_length", hidden // heads)

    def size(self, key: str, default: int | None = None) -> int:
        """A size from 1 to ``MAX_SIZE``, or the default. An array with one value per layer must have equal
        values, or 0 for layers that lack the part."""
        key = self._key(key)
        if self.file.is_array(key):
            values = set(self.file.numbers(key))
            values = values - {0} or values
            if len(values) != 1:
                raise self.unsupported(f"layers of different sizes ({key})")
            value = values.pop()
        else:
            value = self.file.require(key, int) if default is None else self.file.get(key, int, default)
        if not isinstance(value, int) or not (default == value or 1 <= value <= MAX_SIZE):
            raise invalid("model", f"{self.file.path}: {key} is {value}; it must be from 1 to {MAX_SIZE}")
        return value

    def sizes(self, key: str) -> list[int]:
        """A size for each layer, from an array or one value for all layers."""
        if not self.file.is_array(named := self._key(key)):
            return [self.size(key)] * self.layers
        values = [int(value) for value in self.file.numbers(named)]
        if len(values) < self.layers or not all(1 <= value <= MAX_SIZE for value in values):
            message = f"{named} must have a number from 1 to {MAX_SIZE} for each of {self.layers} layers"
            raise invalid("model", f"{self.file.path}: {message}")
        return values

    def numbers(self, key: str) -> list[float]:
        """An array of numbers, one per layer, which may be infinite."""
        key = self._key(key)
        values = [float(value) for value in self.file.numbers(key)] if self.file.is_array(key) else []
        if len(values) < self.layers or any(map(math.isnan, values)):
            raise invalid("model", f"{self.file.path}: {key} must have a number for each of {self.layers} layers")
        return values[: self.layers]

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, or the default."""
        key = self._key(key)
        value = self.file.require(key, float) if default is None else self.file.get(key, float, default)
        if not (math.isfinite(value) and (value > 0 or value == default)):
            raise invalid("model", f"{self.file.path}: {key} is {value}; it must be above 0")
        return float(f"{value:.7g}")  # the shortest decimal number that rounds to the stored float32

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self.file.get(self._key(key), bool, default)
        return value

    def text(self, key: str, default: str) -> str:
        value: str = self.file.get(self._key(key), str, default)
        return value

    def flags(self, key: str) -> list[bool] | None:
        """An array of flags, one per layer; None if the key is absent or not an array."""
        key = self._key(key)
        if not self.file.is_array(key):
            return None
        values = [bool(value) for value in self.file.numbers(key)]
        if len(values) < self.layers:
            message = f"{key} has {len(values)} values; it must have one for each of {self.layers} layers"
            raise invalid("model", f"{self.file.path}: {message}")
        return values

    def last_dimension(self, suffix: str, default: int = 0) -> int:
        """Last dimension of the first tensor ``blk.N.<suffix>``; ``default`` if no layer has this tensor."""
        found = (self.tensors.get(f"blk.{layer}.{suffix}") for layer in range(min(self.layers, len(self.tensors))))
        return next((tensor.shape[-1] for tensor in found if tensor), default)

    def rows(self, name: str) -> int:
        """First dimension of a tensor; 0 if the file lacks it."""
        return self.tensors[name].shape[0] if name in self.tensors else 0

    def has_any(self, suffix: str) -> bool:
        """Whether any layer has the tensor ``blk.N.<suffix>``."""
        return any(f"blk.{layer}.{suffix}" in self.tensors for layer in range(min(self.layers, len(self.tensors))))

    def content_of(self, name: str) -> mmap.mmap:
        """The bytes of the file that contains a tensor."""
        return next(file.content for file in self._files if name in file.tensors)

    def unread(self, keys: tuple[str, ...]) -> str | None:
        """The first of these keys with a nonzero value that was never read; None if all were read or are 0."""
        found = (key for key in keys if self._key(key, note=False) not in self._read)
        return next((key for key in found if self.file.get(self._key(key, note=False), float, 0.0)), None)

    def unsupported(self, feature: str) -> PenstockError:
        message = f"{self.file.path} has {feature}, which is not supported for architecture {self.architecture}"
        return PenstockError(Code.UNSUPPORTED, message, "model")

    def _key(self, key: str, note: bool = True) -> str:
        key = f"{self.architecture}.{key}"
        if note:
            self._read.add(key)
        return key
