"""What identifies the contents of a checkpoint on any machine."""

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
"""Files with weights."""
SAMPLE_BYTES, SPACING = 2**12, 2**24
"""``file_digests`` reads a sample of each tensor, and one more for every ``SPACING`` bytes of it."""


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    data_offsets: tuple[int, int] = (0, 0)


def checkpoint_digest(folder: Path) -> str:
    """Identifies the contents of a checkpoint wherever it lies, by ``file_digests``. An engine folder has the
    digest of the checkpoint that it was built from."""
    if built := read_engine_config(folder):
        return built.weights_version
    digest = hashlib.sha256()
    for name, value in file_digests(folder).items():
        digest.update(f"{name} {value} ".encode())
    return digest.hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """A digest of each file of a checkpoint by its name: of ``config.json`` and the index whole, of safetensors and
    GGUF files by size, header and samples, of PyTorch's by the checksums in them.

    Weights that were trained differ in nearly every number of a tensor; a few numbers that were changed by hand may be
    missed. One sample takes a page of each 16 MiB, so that this takes milliseconds.
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
    """Files of ``PATTERNS``; where there are none, weights may be in GGUF files."""
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def _whole(path: Path) -> Iterator[bytes]:
    yield path.read_bytes()


def _checksums(path: Path) -> Iterator[bytes]:
    """Size, and CRC-32 of every part of a file of ``torch.save``, unless it is damaged, as its reader will tell."""
    yield f"{path.stat().st_size} ".encode()
    with suppress(BadZipFile, NotImplementedError, OSError, ValueError), ZipFile(path) as parts:
        yield repr([(part.filename, part.CRC, part.file_size) for part in parts.infolist()]).encode()


def _safetensors_samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"{size} ".encode()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        yield (header := file.read(min(length, size)))
        for place in _sample_offsets(_spans(header)):
            file.seek(min(8 + length + place, size))
            yield file.read(SAMPLE_BYTES)


def _gguf_samples(path: Path) -> Iterator[bytes]:
    file = GGUFFile(path)
    spans = [(tensor.offset, tensor.offset + tensor.size) for tensor in file.tensors.values()]
    yield file.content[: min((begin for begin, _ in spans), default=len(file.content))]
    for place in _sample_offsets(spans):
        yield file.content[place : place + SAMPLE_BYTES]


def _spans(header: bytes) -> list[tuple[int, int]]:
    """Where tensors begin and end, from the header's end; none where it is damaged, as those who read it will tell."""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor]).values()
    except msgspec.MsgspecError:
        return []
    return [tensor.data_offsets for tensor in tensors]


def _sample_offsets(spans: list[tuple[int, int]]) -> list[int]:
    """Where samples begin."""
    offsets = []
    for begin, end in sorted(spans):
        count = 1 + (end - begin) // SPACING
        room = max(end - begin - SAMPLE_BYTES, 0)
        offsets += [max(begin, 0) + room * (2 * sample + 1) // (2 * count) for sample in range(count)]
    return offsets


_SAMPLED = {".safetensors": _safetensors_samples, ".bin": _checksums, ".gguf": _gguf_samples}
"""What files are identified by; others by all of their contents."""
