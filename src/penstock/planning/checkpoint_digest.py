"""What identifies the contents of a checkpoint on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import msgspec

from .engine_config import read_engine_config
from .gguf_file import GGUFFile

INDEX, PYTORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
PATTERNS = ("*.safetensors", "pytorch_model*.bin")
"""Files with weights."""
SAMPLE_BYTES, SPACING = 2**12, 2**24
"""``checkpoint_digest`` reads a sample of each tensor, and one more for every ``SPACING`` bytes of it."""


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    data_offsets: tuple[int, int] = (0, 0)


def checkpoint_digest(folder: Path) -> str:
    """Identifies the contents of a checkpoint wherever it lies, by ``config.json``, the index, and names, sizes,
    headers and samples of its safetensors or GGUF files, or checksums in those of PyTorch.

    Weights that were trained differ in nearly every number of a tensor; a few numbers that were changed by hand may be
    missed. One sample takes a page of each 16 MiB, so that this takes milliseconds. An engine folder has the digest of
    the checkpoint that it was built from.
    """
    if built := read_engine_config(folder):
        return built.weights_version
    digest = hashlib.sha256()
    files = weight_files(folder)
    for path in [folder / "config.json", folder / INDEX, folder / PYTORCH_INDEX, *files]:
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        if path.suffix == ".bin":
            digest.update(_checksums(path))
            continue
        with path.open("rb") as file:
            if path.suffix != ".safetensors":
                digest.update(file.read())
                continue
            length = int.from_bytes(file.read(8), "little")
            digest.update(header := file.read(min(length, size)))
            for place in _sample_offsets(_spans(header)):
                file.seek(min(8 + length + place, size))
                digest.update(file.read(SAMPLE_BYTES))
    for path in [] if files else sorted(folder.glob("*.gguf")):
        digest.update(f"{path.name} ".encode())
        for sample in _gguf_samples(path):
            digest.update(sample)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Files of ``PATTERNS``; where there are none, weights may be in GGUF files."""
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def _checksums(path: Path) -> bytes:
    """CRC-32 of every part of a file of ``torch.save``; nothing where it is damaged, as its reader will tell."""
    try:
        with ZipFile(path) as parts:
            return repr([(part.filename, part.CRC, part.file_size) for part in parts.infolist()]).encode()
    except (BadZipFile, NotImplementedError, OSError, ValueError):
        return b""


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
