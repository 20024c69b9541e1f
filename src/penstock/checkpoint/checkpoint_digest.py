"""Digests that identify the contents of a checkpoint on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import msgspec

from .engine_config import read_engine_config
from .gguf_file import GGUFFile
from .stored_tensors import INDEX

PYTORCH_INDEX = "pytorch_model.bin.index.json"
PATTERNS = ("*.safetensors", "pytorch_model*.bin")
"""Glob patterns of weight files."""
SAMPLE_BYTES, SPACING = 2**12, 2**24
"""Bytes of a sample, and distance of samples in bytes: a tensor has one sample, and one more per ``SPACING`` bytes."""


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    data_offsets: tuple[int, int] = (0, 0)


def checkpoint_digest(folder: Path) -> str:
    """Digest of a checkpoint's contents (``file_digests``). An engine folder has the digest of the checkpoint that it
    was built from."""
    if built := read_engine_config(folder):
        return built.weights_version
    digest = hashlib.sha256()
    for name, value in file_digests(folder).items():
        digest.update(f"{name} {value} ".encode())
    return digest.hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """Digest of each file of a checkpoint, by file name. ``config.json`` and the index are hashed whole, safetensors
    and GGUF files by size, header and samples, PyTorch files by size and the checksums in them.

    Training changes nearly every value of a tensor, so the samples differ; a few values changed by hand may be missed.
    Only 4 KiB of each 16 MiB are read, which takes milliseconds.
    """
    weights = weight_files(folder) or sorted(folder.glob("*.gguf"))
    paths = [folder / "config.json", folder / INDEX, folder / PYTORCH_INDEX, *weights]
    return {path.name: _file_digest(path) for path in paths if path.is_file()}


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    for part in _SAMPLED.get(path.suffix, _whole)(path):
        digest.update(part)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Safetensors and PyTorch weight files of a folder, sorted; empty for folders with GGUF files only."""
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def _whole(path: Path) -> Iterator[bytes]:
    yield path.read_bytes()


def _checksums(path: Path) -> Iterator[bytes]:
    """Size of a ``torch.save`` file, and CRC-32 of each part of its ZIP archive. The loader reports a damaged file."""
    yield f"{path.stat().st_size} ".encode()
    with suppress(BadZipFile, NotImplementedError, OSError, ValueError), ZipFile(path) as parts:
        yield repr([(part.filename, part.CRC, part.file_size) for part in parts.infolist()]).encode()


def _safetensors_samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"{size} ".encode()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        yield (header := file.read(min(length, size)))
        for offset in _sample_offsets(_spans(header)):
            file.seek(min(8 + length + offset, size))
            yield file.read(SAMPLE_BYTES)


def _gguf_samples(path: Path) -> Iterator[bytes]:
    file = GGUFFile(path)
    spans = [(tensor.offset, tensor.offset + tensor.size) for tensor in file.tensors.values()]
    yield file.content[: min((begin for begin, _ in spans), default=len(file.content))]
    for offset in _sample_offsets(spans):
        yield file.content[offset : offset + SAMPLE_BYTES]


def _spans(header: bytes) -> list[tuple[int, int]]:
    """Begin and end of each tensor, in bytes after the header; empty for a damaged header (the loader reports it)."""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor]).values()
    except msgspec.MsgspecError:
        return []
    return [tensor.data_offsets for tensor in tensors]


def _sample_offsets(spans: list[tuple[int, int]]) -> list[int]:
    offsets = []
    for begin, end in sorted(spans):
        count = 1 + (end - begin) // SPACING
        room = max(end - begin - SAMPLE_BYTES, 0)
        offsets += [max(begin, 0) + room * (2 * sample + 1) // (2 * count) for sample in range(count)]
    return offsets


_SAMPLED = {".safetensors": _safetensors_samples, ".bin": _checksums, ".gguf": _gguf_samples}
"""Functions that yield the bytes to hash, by file suffix; other files are hashed whole."""
