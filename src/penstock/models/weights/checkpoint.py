"""Tensors of a checkpoint in memory-mapped safetensors or PyTorch files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from penstock.checkpoint.checkpoint_digest import PATTERNS, PYTORCH_INDEX, checkpoint_digest
from penstock.checkpoint.stored_tensors import EMBEDDING, HEAD, INDEX, FileStates, Index, are_settled, matches
from penstock.core.errors import invalid
from penstock.core.json_files import read_text_file
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight
from penstock.quant import CheckpointFormat, StackedSource, TensorSource

from ..stored import Stored
from .tensor_files import TensorFile, open_tensors

SINGLE, PYTORCH_SINGLE, MEDUSA = "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"
OTHERS = ("adapter_", "consolidated")
"""Prefixes of files with other weights, or with the same weights under other names."""
OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Suffix of a tensor name → suffix in checkpoints converted from TensorFlow."""
LAYER = re.compile(r"(.*\blayers\.\d+)\.")
EXPERT = re.compile(r"\bexperts\.\d+\.")
SHARD = re.compile(r"-\d{5}-of-\d{5}\.")


class Checkpoint:
    """``layers.Weights`` from the safetensors files of a folder; if it has none, from ``pytorch_model.bin``. Tensors
    are read on demand. A single file may have another name, such as ``gptq_model-4bit-128g.safetensors``.

    Args:
        format: format of quantized matrices; None: no quantization.
        whole: require all files of the index. A pipeline stage only needs the files with its layers.

    Raises ``PenstockError`` (``invalid``) for missing or damaged files, or files with objects other than tensors.
    """

    def __init__(self, folder: Path, format: CheckpointFormat | None = None, whole: bool = True) -> None:
        self._folder = folder
        self._format = format
        self._files: dict[str, TensorFile] = {}
        self._file_of: dict[str, str] = {}
        self.bytes_read = 0
        """Bytes of all tensors and slices read so far."""
        self._read: set[str] = set()
        index, single = _names(folder)
        if (folder / index).exists():
            self._file_of = _read_index(folder / index, Path(single).suffix)
            if whole and (missing := {file for file in self._file_of.values() if not (folder / file).is_file()}):
                names = ", ".join(sorted(missing)[:MAX_NAMED])
                raise self._lacks(names if len(missing) <= MAX_NAMED else f"{len(missing)} files ({names}, …)")
        elif (folder / single).exists():
            self._file_of = dict.fromkeys(self._open(single).names(), single)
        elif pickles := [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]:
            raise invalid(
                "model",
                f"{folder} has weights only as pickles ({pickles[0].name}), which can run code and are not loaded. "
                "Convert them to safetensors.",
            )
        else:
            raise invalid("model", f"{folder} has no {SINGLE}: name a folder with a Hugging Face checkpoint")
        self._unprefixed = "embed_tokens.weight" in self._file_of

    @cached_property
    def version(self) -> str:
        return checkpoint_digest(self._folder)

    @property
    def state(self) -> str:
        """Digest of the files on this machine: ``config.json``, the index, and names, headers, sizes and times.

        A copy of the files has another state; changed weights always have another state. The time of the last status
        change (``ctime``) is included, because tools that copy files restore the modification time.
        """
        digest = hashlib.sha256()
        for name in ("config.json", INDEX, PYTORCH_INDEX):
            if (path := self._folder / name).exists():
                digest.update(path.read_bytes())
        for file in sorted(path for pattern in PATTERNS for path in self._folder.glob(pattern)):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
            with file.open("rb") as content:
                length = int.from_bytes(content.read(8), "little")
                digest.update(content.read(min(length, status.st_size)))
        return digest.hexdigest()

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """See ``layers.Weights.read``. The file is mapped: its pages are read when the rows are used.

        In checkpoints that only have the decoder (embedding models), names have no prefix ``model.``.
        """
        if (stored_shape := self.shape(name)) != shape:
            raise invalid("model", f"tensor {name} has shape {stored_shape}; config.json requires {shape}")
        tensor = self._file(name).read(self.stored_name(name), rows if rows and rows != (0, shape[0]) else None)
        if not as_stored and not (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
            message = f"tensor {name} has dtype {tensor.dtype}; it must be 16-bit or 32-bit floating point"
            raise invalid("model", message)
        self.bytes_read += tensor.nbytes
        self._read.add(name)
        return tensor

    @property
    def names(self) -> list[str]:
        """Names of all tensors, as ``read`` expects them."""
        return [f"model.{name}" if self._unprefixed else name for name in self._file_of]

    def ignored(self) -> list[str]:
        """Names of weights and biases that the model of ``config.json`` does not use: they were not read, but other
        tensors of the same layer were. Two kinds are not listed: tensors of experts, which other ranks may read, and
        zero biases, which GPTQ files have for all matrices."""
        layers = {match[1] for name in self._read if (match := LAYER.match(name))}
        unread = [name for name in self.names if name not in self._read and name.endswith((".weight", ".bias"))]
        return [
            name
            for name in unread
            if (match := LAYER.match(name))
            and match[1] in layers
            and not EXPERT.search(name)
            and not self._is_zero_bias(name)
        ]

    def _is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is the bias of a quantized matrix, and all its values are zero."""
        if not name.endswith(".bias") or self.format_of(name.removesuffix(".bias")) == UNQUANTIZED:
            return False
        return not self._file(name).read(self.stored_name(name), None).any()

    def has(self, name: str) -> bool:
        return self.stored_name(name) in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).shape(self.stored_name(name))

    def format_of(self, name: str) -> Format:
        return self._format.format_of(self._source(name), name) if self._format else UNQUANTIZED

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Number of outputs and inputs of a quantized matrix."""
        assert self._format
        return self._format.shape(self._source(name), name)

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        assert self._format
        return self._format.read(self._source(name), name, outputs, inputs, rows)

    def _source(self, name: str) -> TensorSource:
        weight = f"{name}.weight"
        return StackedSource(self) if self.has(weight) and len(self.shape(weight)) == 3 else self

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the files."""
        name = name.removeprefix("model.") if self._unprefixed else name
        for end, old in OLD_NORMS.items():
            if name.endswith(end) and (stored := name.removesuffix(end) + old) in self._file_of:
                return stored
        return name

    def _file(self, name: str) -> TensorFile:
        if not self.has(name):
            raise invalid("model", f"{self._folder} has no tensor {self.stored_name(name)}")
        return self._open(self._file_of[self.stored_name(name)])

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            if not (self._folder / file).is_file():
                raise self._lacks(file)
            self._files[file] = open_tensors(self._folder / file)
        return self._files[file]

    def _lacks(self, files: str) -> Exception:
        return invalid("model", f"{self._folder} lacks {files}, which its index names: download the checkpoint again")


def has_other_pytorch_head(folder: Path) -> bool:
    """Whether the PyTorch files of a checkpoint have a language model head that differs from the embedding."""
    if any(folder.glob("*.safetensors")):
        return False
    states = [(path, path.stat()) for path in sorted(folder.glob("pytorch_model*.bin")) if path.is_file()]
    files = tuple((path, status.st_size, status.st_mtime_ns) for path, status in states)
    compare = _cached_comparison if are_settled(files) else _has_other_pytorch_head
    return bool(files) and compare(folder, files)


def _has_other_pytorch_head(folder: Path, files: FileStates) -> bool:
    checkpoint = Checkpoint(folder)
    heads, embeddings = ([name for name in checkpoint.names if matches(name, each)] for each in (HEAD, EMBEDDING))
    if not heads or not embeddings:
        return False
    one, other = (checkpoint.read(name, *checkpoint.shape(name), as_stored=True) for name in (heads[0], embeddings[0]))
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride():
        return one.dtype is not other.dtype  # same memory: the tensors are tied
    return not torch.equal(one, other)


_cached_comparison = lru_cache(maxsize=16)(_has_other_pytorch_head)


def tied_embedding(checkpoint: Checkpoint) -> Callable[[str], Stored] | None:
    """Function from a module name to its location, for a checkpoint with tied embeddings that stores the matrix only as
    language model head. None for other checkpoints."""
    heads = [name for name in checkpoint.names if matches(name, HEAD) and name.endswith(".weight")]
    if not heads or any(matches(name, EMBEDDING) for name in checkpoint.names):
        return None
    head = heads[0].removesuffix(".weight")
    return lambda module: Stored(head if matches(f"{module}.weight", EMBEDDING) else module)


def _names(folder: Path) -> tuple[str, str]:
    """Names of the index file and of the single weight file. The folder has one of these."""
    for index, single in ((INDEX, SINGLE), (PYTORCH_INDEX, PYTORCH_SINGLE)):
        if (folder / index).exists() or (folder / single).exists():
            return index, single
    found = [path.name for path in folder.glob("*.safetensors") if not path.name.startswith(OTHERS)]
    if len(found) == 1 and not SHARD.search(found[0]):
        return INDEX, found[0]
    return PYTORCH_INDEX, MEDUSA if (folder / MEDUSA).exists() else PYTORCH_SINGLE


MAX_NAMED = 3
"""Maximum number of missing files named in an error message."""
MAX_FILE_NAME = 255
"""Maximum length of a file name in bytes on Linux."""


def _read_index(path: Path, suffix: str) -> dict[str, str]:
    """Read an index: tensor name → file name. Raises ``PenstockError`` (``invalid``) for a damaged index, or file names
    with another suffix or in other folders."""
    try:
        files = msgspec.json.decode(read_text_file(path), type=Index).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid("model", f"{path} is damaged ({error}): download the file again") from error
    for file in files.values():
        if len(os.fsencode(file)) > MAX_FILE_NAME:
            message = f"{path} names {file[:40]!r}…, a file name of {len(os.fsencode(file))} bytes"
            raise invalid("model", f"{message}; the limit is {MAX_FILE_NAME}")
        if Path(file).name != file:
            raise invalid("model", f"{path} names {file!r}; it must name a file in the same folder")
        if Path(file).suffix != suffix:
            raise invalid("model", f"{path} names {file!r}; it must name a {suffix} file")
    return files
