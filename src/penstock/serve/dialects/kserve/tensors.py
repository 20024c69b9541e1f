"""Tensors of the KServe v2 protocol: datatypes, and their encoding in JSON and in bytes.

Source: the protocol's required API and its binary tensor data extension.
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
"""Datatype → format of ``struct``; elements of BYTES have a length prefix."""
MAX_VALUES = {"FP16": 65504.0, "FP32": 3.4028234663852886e38, "FP64": sys.float_info.max}
"""Largest finite number of each datatype."""
MAX_NAME_LENGTH = 100
"""Characters of a name."""
MAX_RANK, MAX_DIMENSION = 16, 2**63 - 1
"""Dimensions of a tensor, and the size of one, which the protocol has as an INT64."""
MAX_INLINE_ELEMENTS = 65_536
"""Elements encoded as JSON in one turn of the event loop."""
LENGTH = struct.Struct("<I")
"""Length prefix of an element of BYTES."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Elements in row-major order: ``bytes``, ``bool``, ``int`` or ``float``; large FP32 ones as a memoryview."""

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
    """-1 is any length."""
    optional: bool = False


def kind(datatype: str) -> str:
    """The kind of a datatype; datatypes of one kind are converted where the values fit."""
    return "whole" if datatype in INTEGER_CODES else "real" if datatype in FLOAT_CODES else datatype


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Raises ``PenstockError`` (``invalid``) for an invalid shape."""
    if not isinstance(shape, list | tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise invalid(name, "has no shape: a list of sizes from 0 on")
    if len(shape) > MAX_RANK:
        raise invalid(name, f"has a shape of {len(shape)} dimensions, and at most {MAX_RANK} are taken", MAX_RANK)
    if shape and max(shape) > MAX_DIMENSION:
        raise invalid(name, f"has a shape with a size above {MAX_DIMENSION}", MAX_DIMENSION)
    return tuple(shape)


def from_json(name: str, datatype: Any, shape: Any, data: Any) -> Tensor:
    """A tensor from JSON, with elements nested by its shape or in one list.

    Raises ``PenstockError`` (``invalid``) where they are not of its type, or not as many as its shape has.
    """
    _check_datatype(name, datatype)
    elements = [_element(name, datatype, value) for value in _flatten(data)]
    return _checked(Tensor(name, datatype, check_shape(name, shape), elements))


def from_bytes(name: str, datatype: Any, shape: Any, raw: bytes) -> Tensor:
    """A tensor from bytes, little-endian.

    Raises ``PenstockError`` (``invalid``) where they are not as many as its shape has.
    """
    _check_datatype(name, datatype)
    if datatype == BYTES:
        return _checked(Tensor(name, datatype, check_shape(name, shape), _texts(name, raw)))
    size = struct.calcsize(STRUCT_CODES[datatype])
    if len(raw) % size:
        raise invalid(name, f"has {len(raw)} bytes, which are no elements of {datatype}")
    elements = struct.unpack(f"<{len(raw) // size}{STRUCT_CODES[datatype]}", raw)
    return _checked(Tensor(name, datatype, check_shape(name, shape), elements))


def from_elements(name: str, datatype: Any, shape: Any, elements: list[Any]) -> Tensor:
    """A tensor from elements. Raises ``PenstockError`` (``invalid``) as the others do."""
    _check_datatype(name, datatype)
    return _checked(Tensor(name, datatype, check_shape(name, shape), elements))


def to_bytes(tensor: Tensor) -> bytes:
    """The elements as bytes, little-endian."""
    if isinstance(tensor.elements, memoryview):
        return tensor.elements.tobytes()
    if tensor.datatype == BYTES:
        return b"".join([LENGTH.pack(len(element)) + element for element in tensor.elements])
    return struct.pack(f"<{len(tensor.elements)}{STRUCT_CODES[tensor.datatype]}", *tensor.elements)


def to_json(tensor: Tensor) -> list[Any]:
    """The elements as one list for JSON; infinities become the largest finite numbers."""
    if tensor.datatype == BYTES:
        return [element.decode(errors="replace") for element in tensor.elements]
    if tensor.datatype in FLOAT_CODES:
        return [value if math.isfinite(value) else math.copysign(3.4e38, value) for value in tensor.elements]
    return list(tensor.elements)


async def in_json(tensor: Tensor) -> list[Any] | msgspec.Raw:
    """As ``to_json``; a large tensor is encoded in pieces, with turns of other requests in between."""
    if len(tensor.elements) <= MAX_INLINE_ELEMENTS:
        return to_json(tensor)
    pieces = []
    for start in range(0, len(tensor.elements), MAX_INLINE_ELEMENTS):
        part = replace(tensor, elements=tensor.elements[start : start + MAX_INLINE_ELEMENTS])
        pieces.append(msgspec.json.encode(to_json(part))[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def text(name: str, element: bytes) -> str:
    """The text of an element. Raises ``PenstockError`` (``invalid``) for invalid UTF-8."""
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise invalid(name, f"is not valid UTF-8: {error}") from error


def _check_datatype(name: str, datatype: Any) -> None:
    if len(name) > MAX_NAME_LENGTH:
        raise invalid("name", f"of {len(name)} characters is longer than {MAX_NAME_LENGTH}", MAX_NAME_LENGTH)
    if not isinstance(datatype, str) or (datatype != BYTES and datatype not in STRUCT_CODES):
        raise invalid(
            name, f"has the datatype {str(datatype)[:50]!r}, which is not one of {BYTES}, {', '.join(STRUCT_CODES)}"
        )


def _checked(tensor: Tensor) -> Tensor:
    expected = math.prod(tensor.shape)
    if len(tensor.elements) != expected:
        raise invalid(
            tensor.name, f"has {len(tensor.elements)} elements, and its shape {list(tensor.shape)} {expected}"
        )
    return tensor


def _flatten(data: Any) -> Iterator[Any]:
    """The elements of nested lists."""
    left = [iter([data])]
    while left:
        for value in left[-1]:
            if isinstance(value, list):
                left.append(iter(value))
                break
            yield value
        else:
            left.pop()


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
            raise invalid(name, f"has an integer that no {datatype} holds") from error
    if datatype in INTEGER_CODES and type(value) is int:
        return value
    raise invalid(name, f"{str(value)[:50]!r} is no element of {datatype}")


def _texts(name: str, raw: bytes) -> list[bytes]:
    result, at = [], 0
    while at < len(raw):
        if at + LENGTH.size > len(raw):
            raise invalid(name, "ends within the length of an element")
        (length,) = LENGTH.unpack_from(raw, at)
        at += LENGTH.size
        if at + length > len(raw):
            raise invalid(name, f"has an element of {length} bytes where {len(raw) - at} are left")
        result.append(raw[at : at + length])
        at += length
    return result
