"""Headers of safetensors files, and the dtype and language model head of a checkpoint. No torch."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING = re.compile(r"(.+\.)?(embed_tokens|tok_embeddings|wte|word_embeddings|embed_in|embeddings?)\.weight")
HEAD = re.compile(r"(.+\.)?(lm_head|proj_out|embed_out|output)\.(weight|qweight|weight_packed)")
LAYER = re.compile(r"(^|\.)(layers|blocks|h|encoder)\.")
"""Part of a tensor name that shows that it belongs to a layer or encoder: no head or embedding of the whole model."""
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
OTHERS = ("adapter_", "consolidated")
"""Prefixes of files with other weights, or with the same weights under other names."""
CHUNK = 2**20
SETTLE_TIME = 1_000_000_000
"""Nanoseconds after a file's last modification during which results are not cached. A second change within one tick of
the file system's clock (4 to 10 ms) does not change the modification time."""

FileStates = tuple[tuple[Path, int, int], ...]
"""Path, size and modification time (ns) of files, the key of cached results."""
Head = Literal["unknown", "absent", "same", "other"]
"""Language model head in the files: "same" as the embedding or an "other" matrix; "unknown" without safetensors."""


class StoredTensor(msgspec.Struct):
    """An entry of a safetensors header."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


class Index(msgspec.Struct):
    """``model.safetensors.index.json`` or ``pytorch_model.bin.index.json`` of a sharded checkpoint."""

    weight_map: dict[str, str]
    """Tensor name → file name."""


def plan_shards(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Distribute tensors to files in order: file name → tensor names.

    Args:
        sizes: bytes of each tensor.
        max_bytes: maximum size of a file that has more than one tensor.
    """
    groups: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if size > room and groups[-1]:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


class _Span(NamedTuple):
    """Byte range of a tensor in a file."""

    path: Path
    first: int
    end: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of a safetensors file, and the byte offset of its data. Raises ``OSError`` or
    ``msgspec.MsgspecError`` for an unreadable file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        content = file.read(min(length, path.stat().st_size))
    tensors = msgspec.json.decode(content, type=dict[str, StoredTensor])
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def stored_dtype(folder: Path) -> str | None:
    """Dtype of the first 16-bit or 32-bit floating-point tensor in the first file (the default of transformers); None
    if no tensor has such a dtype."""
    for path in _files(folder)[:1]:
        with suppress(OSError, msgspec.MsgspecError, RecursionError):
            tensors, _ = read_header(path)
            ordered = sorted(tensors.values(), key=lambda tensor: tensor.data_offsets)
            return next((DTYPES[tensor.dtype] for tensor in ordered if tensor.dtype in DTYPES), None)
    return None


def stored_head(folder: Path) -> Head:
    """Whether the files have a language model head, and whether it differs from the embedding. A checkpoint may have a
    head although ``tie_word_embeddings`` is set."""
    states = []
    for path in _files(folder):
        with suppress(OSError, ValueError):  # the file is missing, or its name is impossible: the loader reports it
            status = path.stat()
            states.append((path, status.st_size, status.st_mtime_ns))
    files = tuple(states)
    return _cached_head(folder, files) if are_settled(files) else _stored_head(folder, files)


def are_settled(files: FileStates) -> bool:
    """True if no file was modified within ``SETTLE_TIME``: size and modification time then identify the contents."""
    return all(modified < time.time_ns() - SETTLE_TIME for _, _, modified in files)


def _stored_head(folder: Path, files: FileStates) -> Head:
    if not files:
        return "unknown"
    try:
        heads, embeddings = (_find(folder, pattern) for pattern in (HEAD, EMBEDDING))
        if not heads:
            return "absent" if embeddings else "unknown"
        if not embeddings:
            return "unknown"
        return "same" if _equal(heads[0], embeddings[0]) else "other"
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):  # the loader reports it
        return "unknown"


_cached_head = lru_cache(maxsize=16)(_stored_head)


def _files(folder: Path) -> list[Path]:
    """The safetensors files to load: those in the index, ``model.safetensors``, or the only safetensors file."""
    if (folder / INDEX).is_file():
        with suppress(OSError, msgspec.MsgspecError, RecursionError):
            files = set(_read_index(folder).values())
            return sorted(folder / file for file in files if Path(file).name == file)
        return []
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = [path for path in folder.glob("*.safetensors") if not path.name.startswith(OTHERS)]
    return found if len(found) == 1 else []


def _read_index(folder: Path) -> dict[str, str]:
    return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index).weight_map


def _find(folder: Path, pattern: re.Pattern[str]) -> list[_Span]:
    if (folder / INDEX).is_file():
        files = _read_index(folder)
        paths = {folder / file for name, file in files.items() if matches(name, pattern) and Path(file).name == file}
    else:
        paths = {*_files(folder)}
    found = []
    for path in sorted(paths):
        tensors, base = read_header(path)
        found += [
            _Span(path, *(base + offset for offset in tensor.data_offsets))
            for name, tensor in tensors.items()
            if matches(name, pattern)
        ]
    return found


def matches(name: str, pattern: re.Pattern[str]) -> bool:
    """Whether a tensor is the language model head (``HEAD``) or the embedding (``EMBEDDING``) of the whole model."""
    return pattern.fullmatch(name) is not None and not LAYER.search(name)


def _equal(one: _Span, other: _Span) -> bool:
    """Whether two tensors have the same bytes."""
    size = one.end - one.first
    if size != other.end - other.first:
        return False
    first, second = bytearray(CHUNK), bytearray(CHUNK)
    with one.path.open("rb", buffering=0) as a, other.path.open("rb", buffering=0) as b:
        a.seek(one.first)
        b.seek(other.first)
        while size > 0:
            count = min(size, CHUNK)
            if count < len(first):
                first, second = bytearray(count), bytearray(count)
            if a.readinto(first) != count or b.readinto(second) != count:
                raise ValueError(f"{one.path} or {other.path} is shorter than its header says")
            if first != second:
                return False
            size -= count
    return True
