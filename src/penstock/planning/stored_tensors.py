"""What the safetensors files of a checkpoint say that ``config.json`` may not: the dtype, and whether the language
model head is a matrix of its own. No torch."""

from __future__ import annotations

import mmap
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec

INDEX = "model.safetensors.index.json"
EMBEDDING = re.compile(r"(.+\.)?(embed_tokens|tok_embeddings|wte|word_embeddings|embed_in)\.weight")
HEAD = re.compile(r"(.+\.)?(lm_head|proj_out|embed_out|output)\.(weight|qweight|weight_packed)")
LAYER = re.compile(r"(^|\.)(layers|blocks|h|encoder)\.")
"""Part of the names of tensors within layers, and of an encoder, whose matrices are no heads."""
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
OTHERS = ("adapter_", "consolidated")
"""Beginnings of files with other weights, or the same under other names."""
CHUNK = 2**20

Head = Literal["unknown", "absent", "same", "other"]
"""A language model head in the files: not known without safetensors files, none, the embedding, or another matrix."""


class StoredTensor(msgspec.Struct):
    """An entry of a safetensors header."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


class _Place(NamedTuple):
    path: Path
    first: int
    end: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of a safetensors file, and where its data begins. Raises ``OSError`` or ``msgspec.MsgspecError``."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        content = file.read(min(length, path.stat().st_size))
    tensors = msgspec.json.decode(content, type=dict[str, StoredTensor])
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def stored_dtype(folder: Path) -> str | None:
    """The dtype of the first floating-point tensor of 16 or 32 bits in the first file, as transformers takes it where
    ``config.json`` names none; None without one."""
    for path in _files(folder)[:1]:
        with suppress(OSError, msgspec.MsgspecError, RecursionError):
            tensors, _ = read_header(path)
            ordered = sorted(tensors.values(), key=lambda tensor: tensor.data_offsets)
            return next((DTYPES[tensor.dtype] for tensor in ordered if tensor.dtype in DTYPES), None)
    return None


def stored_head(folder: Path) -> Head:
    """Whether a checkpoint has a language model head, and another than its embedding. A checkpoint may have one in
    spite of ``tie_word_embeddings``."""
    state = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in _files(folder) if path.is_file())
    return _stored_head(folder, state)


@lru_cache(maxsize=16)
def _stored_head(folder: Path, state: tuple[tuple[Path, int, int], ...]) -> Head:
    if not state:
        return "unknown"
    try:
        heads, embeddings = (_find(folder, pattern) for pattern in (HEAD, EMBEDDING))
        if not heads:
            return "absent" if embeddings else "unknown"
        if not embeddings:
            return "unknown"
        return "same" if _equal(heads[0], embeddings[0]) else "other"
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):  # which loading tells
        return "unknown"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(OTHERS))


def _find(folder: Path, pattern: re.Pattern[str]) -> list[_Place]:
    """Where the tensors of a pattern are."""
    if (folder / INDEX).is_file():
        files = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index).weight_map
        paths = {folder / file for name, file in files.items() if matches(name, pattern) and Path(file).name == file}
    else:
        paths = {*_files(folder)}
    found = []
    for path in sorted(paths):
        tensors, base = read_header(path)
        found += [
            _Place(path, *(base + offset for offset in tensor.data_offsets))
            for name, tensor in tensors.items()
            if matches(name, pattern)
        ]
    return found


def matches(name: str, pattern: re.Pattern[str]) -> bool:
    """Whether a tensor is the language model head (``HEAD``) or the embedding (``EMBEDDING``) of the whole model."""
    return pattern.fullmatch(name) is not None and not LAYER.search(name)


def _equal(one: _Place, other: _Place) -> bool:
    """Whether two tensors have the same bytes."""
    if one.end - one.first != other.end - other.first:
        return False
    with one.path.open("rb") as a, other.path.open("rb") as b, _mapped(a) as x, _mapped(b) as y:
        if one.end > len(x) or other.end > len(y):
            raise ValueError("the file is shorter than its header says")
        return all(
            x[one.first + at : min(one.first + at + CHUNK, one.end)]
            == y[other.first + at : min(other.first + at + CHUNK, other.end)]
            for at in range(0, one.end - one.first, CHUNK)
        )


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
