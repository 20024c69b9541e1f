"""Header of a GGUF file (llama.cpp): metadata, and the type, shape and offset of each tensor.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Files are not trusted: every
count, length and offset is checked against the file before it is used. Arrays are decoded on request. The ``gguf``
package has no such checks, and reads a vocabulary of 262,144 tokens in 14 seconds; this reader takes 0.3 seconds.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 2**28
"""Maximum size of the header in bytes; a tokenizer with 150,000 tokens takes 8 MB."""
MAX_NAME = 2**16
"""Maximum length of a key or tensor name in bytes."""
MAX_ENTRIES = 2**16
"""Maximum number of metadata values, and of tensors."""
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""``struct`` format of each scalar type."""
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z")
"""End of a file name: part number and number of parts of a model in several files."""
PROJECTOR = "mmproj"
"""Start of the names of files with a vision encoder, which are not models."""


class TensorType(NamedTuple):
    """Storage format of a tensor."""

    name: str
    block: int
    """Elements per block. A row has whole blocks."""
    size: int
    """Bytes per block."""
    format: Format
    """Format in which kernels use the weights. Integers of 5 and 6 bits, and indices of a table (``IQ4``), are widened
    to 8-bit integers."""


TYPES = {
    0: TensorType("F32", 1, 4, UNQUANTIZED),
    1: TensorType("F16", 1, 2, UNQUANTIZED),
    2: TensorType("Q4_0", 32, 18, Format(4, 32)),
    3: TensorType("Q4_1", 32, 20, Format(4, 32, asymmetric=True)),
    6: TensorType("Q5_0", 32, 22, Format(8, 32)),
    7: TensorType("Q5_1", 32, 24, Format(8, 32, asymmetric=True)),
    8: TensorType("Q8_0", 32, 34, Format(8, 32)),
    10: TensorType("Q2_K", 256, 84, Format(4, 16, asymmetric=True)),
    11: TensorType("Q3_K", 256, 110, Format(4, 16)),
    12: TensorType("Q4_K", 256, 144, Format(4, 32, asymmetric=True)),
    13: TensorType("Q5_K", 256, 176, Format(8, 32, asymmetric=True)),
    14: TensorType("Q6_K", 256, 210, Format(8, 16)),
    20: TensorType("IQ4_NL", 32, 18, Format(8, 32)),
    23: TensorType("IQ4_XS", 256, 136, Format(8, 32)),
    30: TensorType("BF16", 1, 2, UNQUANTIZED),
    39: TensorType("MXFP4", 32, 17, Format(4, 32, floating=True)),
}
"""Supported types, by their number in the file."""
OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
"""Names of unsupported types by their number, for the error message."""


@dataclass(frozen=True)
class GGUFTensor:
    """Type, shape and location of a tensor."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    """Shape in PyTorch's order, ``[outputs, inputs]`` for a matrix."""
    offset: int
    """Bytes from the start of the file."""
    size: int
    """Size in bytes."""


class _Array(NamedTuple):
    """Location of an array in the metadata: element type, number of elements, and byte offset in the file."""

    kind: int
    length: int
    offset: int


class GGUFFile:
    """A memory-mapped GGUF file.

    Raises ``PenstockError``: ``invalid`` for a file that is damaged or unreadable; ``unsupported`` for an unknown
    version, big-endian files, and unsupported tensor types.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self.content = _map(path)
        """The bytes of the file."""
        self._at = 0
        try:
            self._read()
        except (struct.error, OverflowError):
            self._damaged("its header is cut short")
        except UnicodeDecodeError as error:
            self._damaged(f"its header is not UTF-8: {error}")

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """A metadata value, or ``default`` if the key is absent.

        Args:
            kind: type of the value: ``str``, ``bool``, ``int``, or ``float`` (also accepts integers).

        Raises ``PenstockError`` (``invalid``) for a value of a different type.
        """
        value = self._metadata.get(key)
        if value is None:
            return default
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            raise invalid("model", f"{self.path}: {key} is {value!r:.40}; it must be of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type[Any]) -> Any:
        """Same as ``get``, but a missing key also raises ``PenstockError`` (``invalid``)."""
        if key not in self._metadata:
            raise invalid("model", f"{self.path} lacks {key}: convert the model again with llama.cpp")
        return self.get(key, kind)

    def is_array(self, key: str) -> bool:
        return isinstance(self._metadata.get(key), _Array)

    def strings(self, key: str) -> list[str]:
        """An array of strings; empty if the key is absent. Raises ``PenstockError`` (``invalid``) for another value."""
        array = self._array(key)
        if array is None:
            return []
        if array.kind != STRING:
            raise invalid("model", f"{self.path}: {key} is not an array of strings")
        result, at, content = [], array.offset, self.content
        try:
            for _ in range(array.length):
                (length,) = _U64(content, at)
                at += 8 + length
                result.append(content[at - length : at].decode())
        except UnicodeDecodeError:
            self._damaged(f"{key} is not UTF-8")
        return result

    def numbers(self, key: str) -> list[Any]:
        """An array of numbers; empty if the key is absent. Raises ``PenstockError`` (``invalid``) for another value."""
        array = self._array(key)
        if array is None:
            return []
        if array.kind == STRING:
            raise invalid("model", f"{self.path}: {key} is not an array of numbers")
        return list(struct.unpack_from(f"<{array.length}{SCALARS[array.kind]}", self.content, array.offset))

    def _array(self, key: str) -> _Array | None:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, _Array):
            raise invalid("model", f"{self.path}: {key} is {value!r:.40}; it must be an array")
        return value

    # --- The header ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self.content[:4] != MAGIC:
            self._damaged("it does not begin with the bytes GGUF")
        self._at = 4
        version = self._number("I")
        if version & 0xFFFF == 0:
            message = f"{self.path} is big-endian: convert the model on a little-endian machine"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        if version not in VERSIONS:
            message = f"{self.path} has GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are supported"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        if max(num_tensors, num_values) > MAX_ENTRIES:
            self._damaged(f"its header has {num_values} values and {num_tensors} tensors; {MAX_ENTRIES} are allowed")
        for _ in range(num_values):
            key = self._string()
            if key in self._metadata:
                self._damaged(f"it has {key!r} twice")
            self._metadata[key] = self._value(self._number("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.get("general.alignment", int, 32)
        if alignment < 8 or alignment & (alignment - 1):
            self._damaged(f"its alignment is {alignment}, which is not a power of 2 from 8 on")
        self._place(entries, start=-(-self._at // alignment) * alignment, alignment=alignment)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string(MAX_HEADER)
        if kind != ARRAY:
            return self._number(self._letter(kind))
        kind, count = self._number("I"), self._number("Q")
        start = self._at
        if kind != STRING:
            self._skip(count * struct.calcsize(f"<{self._letter(kind)}"))
            return _Array(kind, count, start)
        if 8 * count > len(self.content) - start:
            self._damaged(f"an array in its header has {count} strings, more than fit in the file")
        content, at, end = self.content, start, min(len(self.content), MAX_HEADER)
        for _ in range(count):
            (length,) = _U64(content, at)
            at += 8 + length
            if at > end:
                self._damaged(f"its header is cut short, or has more than {MAX_HEADER} bytes")
        self._at = at
        return _Array(kind, count, start)

    def _tensor_entry(self) -> tuple[str, list[int], int, int]:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._damaged(f"tensor {name!r} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = [self._number("Q") for _ in range(dimensions)]
        return name, shape, self._number("I"), self._number("Q")

    def _place(self, entries: list[tuple[str, list[int], int, int]], start: int, alignment: int) -> None:
        """Check the locations of the tensors, and fill ``tensors``."""
        for name, dimensions, number, offset in entries:
            if (kind := TYPES.get(number)) is None:
                known = ", ".join(sorted(type.name for type in TYPES.values()))
                found = OTHER_TYPES.get(number, number)
                message = f"{self.path}: tensor {name!r} has type {found}, which is not supported; supported: {known}"
                raise PenstockError(Code.UNSUPPORTED, message, "model")
            if name in self.tensors:
                self._damaged(f"it has tensor {name!r} twice")
            if not all(dimensions) or dimensions[0] % kind.block:
                self._damaged(f"tensor {name!r} has dimensions {dimensions}, not whole blocks of {kind.block}")
            size = prod(dimensions) // kind.block * kind.size
            if offset % alignment or start + offset + size > len(self.content):
                self._damaged(f"tensor {name!r} does not lie within the file")
            self.tensors[name] = GGUFTensor(name, kind, tuple(reversed(dimensions)), start + offset, size)
        for first, second in pairwise(sorted(self.tensors.values(), key=lambda tensor: tensor.offset)):
            if first.offset + first.size > second.offset:
                self._damaged(f"tensors {first.name!r} and {second.name!r} overlap")

    def _letter(self, kind: int) -> str:
        if kind not in SCALARS:
            self._damaged(f"its header has a value of type {kind}")
        return SCALARS[kind]

    def _number(self, letter: str) -> Any:
        (value,) = struct.unpack_from(f"<{letter}", self.content, self._at)
        self._skip(struct.calcsize(f"<{letter}"))
        return value

    def _string(self, limit: int = MAX_NAME) -> str:
        length = self._number("Q")
        if length > limit:
            self._damaged(f"its header has a string of {length} bytes; at most {limit} are allowed")
        start = self._at
        self._skip(length)
        return self.content[start : self._at].decode()

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > min(len(self.content), MAX_HEADER):
            self._damaged(f"its header is cut short, or has more than {MAX_HEADER} bytes")

    def _damaged(self, reason: str) -> NoReturn:
        raise invalid("model", f"{self.path} is damaged ({reason}): download the file again")


def parts_of(path: Path) -> list[Path]:
    """The files of a model in order: the file itself, or all parts of ``NAME-00001-of-00003.gguf``.

    Args:
        path: the file, or any part.

    Raises ``PenstockError`` (``invalid``) if a part is missing.
    """
    if not (match := PART.search(path.name)):
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    parts = [path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise invalid("model", f"{path.parent} lacks {missing[0]}, a part of this model: download all {count} parts")
    return parts


def parts_in(folder: Path) -> list[Path]:
    """The files of the model in a folder, in order; empty if the folder has no GGUF file.

    Raises ``PenstockError`` (``invalid``) if the folder has several models.
    """
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith(PROJECTOR))
    if files and len(parts_of(files[0])) != len(files):
        raise invalid("model", f"{folder} has several models: name one of {', '.join(file.name for file in files)}")
    return files


_U64 = struct.Struct("<Q").unpack_from


def _map(path: Path) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # do not wait for the writer of a FIFO
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise invalid("model", f"{path} is not a regular file: name a GGUF file")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise invalid("model", f"{path} cannot be read: {error}") from error
