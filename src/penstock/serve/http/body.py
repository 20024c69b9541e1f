"""Reading a request's body: no more of it and no longer than allowed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .unknown_fields import UnknownFields

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")


async def read_body(request: Request, most: int, patience: float) -> bytes:
    """At most so many bytes, from a client that is silent for no more than ``patience`` seconds.

    Raises ``PenstockError`` where the body is too large, or its client falls silent or goes in the middle of it.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        while True:
            part = await asyncio.wait_for(anext(stream, None), patience)
            if part is None:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > most:
                raise _too_large(most)
    except TimeoutError as error:
        words = f"no more of it came for {patience:g} seconds"
        raise PenstockError(Code.TIMEOUT, f"body: {words}", "body", patience) from error
    except ClientDisconnect as error:
        raise PenstockError(Code.CANCELLED, "the client has gone in the middle of its request") from error


def read_object(body: bytes) -> dict[str, Any]:
    """A request's JSON, whatever type its client said it has.

    Raises ``PenstockError`` (``invalid``) where it is none.
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid("body", f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid("body", "is not a JSON object")
    return found


def convert(found: dict[str, Any], schema: type[T], unknown: UnknownFields) -> T:
    """A request from its JSON, of which nothing else is left.

    Args:
        unknown: told of fields that the schema does not have.

    Raises ``PenstockError`` (``invalid``) for wrong values, and for unknown fields where requests are read strictly.
    """
    try:
        unknown.remove(found, schema)
        return msgspec.convert(found, schema, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        words, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        named = re.search(r"field `(\w+)`", words)  # missing, or unknown
        raise invalid(field or (named[1] if named else "body"), words) from error


def given(found: V | None, path: str) -> V:
    """A value that has to be there. Raises ``PenstockError`` (``invalid``) where it is not."""
    if found is None:
        raise invalid(path, "is missing")
    return found


def check_supported(found: Mapping[str, Any], reasons: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse what a server elsewhere has, and this one has not.

    Args:
        reasons: by field, the one value that may be given besides null, and what is said to any other.

    Raises ``PenstockError`` (``unsupported``) with the field's name.
    """
    for name, (allowed, why) in reasons.items():
        if found.get(name) not in (None, allowed):
            raise PenstockError(Code.UNSUPPORTED, f"{name}: {why}", name)


def _too_large(most: int) -> PenstockError:
    return PenstockError(Code.TOO_LARGE, f"body: must have at most {most} bytes", "body", most)
