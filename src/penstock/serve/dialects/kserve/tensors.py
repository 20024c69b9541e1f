"""Tensors of the KServe v2 protocol: datatypes, and encoding as JSON and as bytes.

Source: the required API of the protocol and the binary tensor data extension.
"""

from __future__ import annotations

import asyncio
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.core.errors import invalid

BYTES, BOOL, INT32, INT64, UINT64, FP32 = "BYTES", "BOOL", "INT32", "INT64", "UINT64", "FP32"
INTEGER_CODES = {
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
}
FLOAT_CODES = {"FP16": "e", "FP32": "f", "FP64": "d"}
STRUCT_CODES = {"BOOL": "?", **INTEGER_CODES, **FLOAT_CODES}
"""Datatype → ``struct`` format character. BYTES is not included: its elements have a length prefix."""
MAX_VALUES = {"FP16": 65504.0, "FP32": 3.4028234663852886e38, "FP64": sys.float_info.max}
"""Largest finite number of each datatype."""
MAX_NAME_LENGTH = 100
"""Maximum length of a name, characters."""
MAX_RANK, MAX_DIMENSION = 16, 2**63 - 1
"""Maximum number of dimensions, and maximum size of a dimension (INT64 in the protocol)."""
MAX_INLINE_ELEMENTS = 65_536
"""Maximum number of elements encoded as JSON in one turn of the event loop."""
LENGTH = struct.Struct("<I")
"""Length prefix of an element of BYTES."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. Elements are ``bytes``, ``bool``, ``int`` or ``float`` in row-major order, or an FP32 memoryview."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """An input or output of a model, without the batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (1,)
    """Size of each dimension; -1: any size."""
    optional: bool = False


def kind(datatype: str) -> str:
    """The kind of a datatype. Tensors are converted between datatypes of the same kind if the values fit."""
    return "whole" if datatype in INTEGER_CODES else "real" if datatype in FLOAT_CODES else datatype


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Validate a shape. Raises ``PenstockError`` (``invalid``)."""
    if not isinstance(shape, list | tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise invalid(name, f"must have a shape, a list of integers of at least 0, has {str(shape)[:50]!r}")
    if len(shape) > MAX_RANK:
        raise invalid(name, f"has {len(shape)} dimensions; the maximum is {MAX_RANK}", MAX_RANK)
    if shape and max(shape) > MAX_DIMENSION:
        raise invalid(name, f"has a dimension larger than {MAX_DIMENSION}: {max(shape)}", MAX_DIMENSION)
    return tuple(shape)


def from_json(name: str, datatype: Any, shape: Any, data: Any) -> Tensor:
    """Make a tensor from decoded JSON, a nested or flat list of elements.

    Raises ``PenstockError`` (``invalid``) if the elements do not match the datatype, or do not fill the shape.
    """
    _check_datatype(name, datatype)
    elements = [_element(name, datatype, value) for value in _flatten(data)]
    return _checked(Tensor(name, datatype, check_shape(name, shape), elements))


def from_bytes(name: str, datatype: Any, shape: Any, raw: bytes) -> Tensor:
    """Make a tensor from little-endian bytes. Raises ``PenstockError`` (``invalid``) if they do not fill the shape."""
    _check_datatype(name, datatype)
    if datatype == BYTES:
        return _checked(Tensor(name, datatype, check_shape(name, shape), _texts(name, raw)))
    size = struct.calcsize(STRUCT_CODES[datatype])
    if len(raw) % size:
        raise invalid(name, f"has {len(raw)} bytes; must be a multiple of {size} bytes (size of {datatype})")
    elements = struct.unpack(f"<{len(raw) // size}{STRUCT_CODES[datatype]}", raw)
    return _checked(Tensor(name, datatype, check_shape(name, shape), elements))


def from_elements(name: str, datatype: Any, shape: Any, elements: list[Any]) -> Tensor:
    """Make a tensor from a flat list. Raises ``PenstockError`` (``invalid``) if the elements do not fill the shape."""
    _check_datatype(name, datatype)
    return _checked(Tensor(name, datatype, check_shape(name, shape), elements))


def to_bytes(tensor: Tensor) -> bytes:
    """The elements as little-endian bytes."""
    if isinstance(tensor.elements, memoryview):
        return tensor.elements.tobytes()
    if tensor.datatype == BYTES:
        return b"".join([LENGTH.pack(len(element)) + element for element in tensor.elements])
    return struct.pack(f"<{len(tensor.elements)}{STRUCT_CODES[tensor.datatype]}", *tensor.elements)


def to_json(tensor: Tensor) -> list[Any]:
    """The elements as a flat list for JSON; infinities are replaced by the largest finite FP32 numbers."""
    if tensor.datatype == BYTES:
        return [element.decode(errors="replace") for element in tensor.elements]
    if tensor.datatype in FLOAT_CODES:
        return [value if math.isfinite(value) else math.copysign(3.4e38, value) for value in tensor.elements]
    return list(tensor.elements)


async def in_json(tensor: Tensor) -> list[Any] | msgspec.Raw:
    """Same as ``to_json``, but large tensors are encoded in chunks, one per turn of the event loop."""
    if len(tensor.elements) <= MAX_INLINE_ELEMENTS:
        return to_json(tensor)
    chunks = []
    for start in range(0, len(tensor.elements), MAX_INLINE_ELEMENTS):
        part = replace(tensor, elements=tensor.elements[start : start + MAX_INLINE_ELEMENTS])
        chunks.append(msgspec.json.encode(to_json(part))[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(chunks) + b"]")


def text(name: str, element: bytes) -> str:
    """Decode a BYTES element. Raises ``PenstockError`` (``invalid``) for invalid UTF-8."""
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise invalid(name, f"is not valid UTF-8: {error}") from error


def _check_datatype(name: str, datatype: Any) -> None:
    if len(name) > MAX_NAME_LENGTH:
        raise invalid("name", f"has {len(name)} characters; the maximum is {MAX_NAME_LENGTH}", MAX_NAME_LENGTH)
    if not isinstance(datatype, str) or (datatype != BYTES and datatype not in STRUCT_CODES):
        known = f"{BYTES}, {', '.join(STRUCT_CODES)}"
        raise invalid(name, f"has the datatype {str(datatype)[:50]!r}; must be one of {known}")


def _checked(tensor: Tensor) -> Tensor:
    expected = math.prod(tensor.shape)
    if len(tensor.elements) != expected:
        message = f"has {len(tensor.elements)} elements; its shape {list(tensor.shape)} requires {expected}"
        raise invalid(tensor.name, message)
    return tensor


def _flatten(data: Any) -> Iterator[Any]:
    """Yield the elements of nested lists in row-major order."""
    stack = [iter([data])]
    while stack:
        for value in stack[-1]:
            if isinstance(value, list):
                stack.append(iter(value))
                break
            yield value
        else:
            stack.pop()


def _element(name: str, datatype: str, value: Any) -> Any:
    if datatype == BYTES and isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise invalid(name, f"is not valid text: {error}") from error
    if datatype == BOOL and (isinstance(value, bool) or value in (0, 1)):
        return bool(value)
    if datatype in FLOAT_CODES and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise invalid(name, f"has an integer out of the range of {datatype}") from error
    if datatype in INTEGER_CODES and type(value) is int:
        return value
    raise invalid(name, f"must be {datatype}, has {str(value)[:50]!r}")


def _texts(name: str, raw: bytes) -> list[bytes]:
    result, offset = [], 0
    while offset < len(raw):
        if offset + LENGTH.size > len(raw):
            raise invalid(name, f"ends inside the length prefix of an element ({LENGTH.size} bytes at byte {offset})")
        (length,) = LENGTH.unpack_from(raw, offset)
        offset += LENGTH.size
        if offset + length > len(raw):
            raise invalid(name, f"has an element of {length} bytes, but only {len(raw) - offset} bytes remain")
        result.append(raw[offset : offset + length])
        offset += length
    return result
