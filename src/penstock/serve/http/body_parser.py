"""Parsing request bodies without holding up the event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.core.errors import invalid
from penstock.core.fair_lock import FairLock
from penstock.frontend.fair_queue import FairQueue

T = TypeVar("T")

MAX_INLINE_SIZE = 2**14
"""Bytes of a body that is parsed in the event loop; larger ones are parsed in a thread."""
MAX_OBJECTS = 2**16
"""Objects and arrays of a JSON body."""
MAX_MEMBERS = 2**18
"""Members of all its objects together."""
MAX_VALUES = 2**20
"""Its numbers, texts and other values."""
MAX_WIDE_TEXT = 2**24
"""About how many bytes a text of it may have that is not ASCII. It is decoded in one piece, to up to 4 bytes a
character, and no other thread runs meanwhile: 64 MiB take 0.4 s."""
OBJECT_BYTES, VALUE_BYTES = 400, 64
"""About how much memory an object or array takes once it is parsed, and a member or value."""
PIECE_SIZE = 2**16
"""Bytes that are counted at a time; other threads run in between."""
STRUCTURE = b'"\\{[:,'
NOT_STRUCTURE = bytes(set(range(256)) - set(STRUCTURE))


class BodyParser:
    """Parses bodies: small ones in the event loop, one per iteration; large ones in a thread, one at a time. Clients
    take turns."""

    def __init__(self) -> None:
        self._small = FairQueue()
        self._large = FairLock()
        self._thread = ThreadPoolExecutor(1, "parse")

    async def parse(self, client: str, size: int, work: Callable[[], T]) -> T:
        """Run ``work`` on a body of ``size`` bytes, in a thread where it is large."""
        if size <= MAX_INLINE_SIZE:
            await self._small.wait_turn(client)
            return work()
        await self._large.acquire(client)
        parsing = self._thread.submit(contextvars.copy_context().run, work)
        loop = asyncio.get_running_loop()
        parsing.add_done_callback(lambda _: loop.call_soon_threadsafe(self._large.release))
        return await asyncio.wrap_future(parsing)


class ElementCount:
    """Counts the elements of JSON texts without parsing them.

    Args:
        field: the request's field that has the texts, for errors.
    """

    def __init__(self, field: str = "body") -> None:
        self._field = field
        self._objects = self._members = self._values = self._quotes = 0

    def add(self, text: bytes) -> None:
        """Count a text. Raises ``PenstockError`` (``invalid``) where all of them together have more than
        ``MAX_OBJECTS``, ``MAX_MEMBERS`` or ``MAX_VALUES``, or one is longer than ``MAX_WIDE_TEXT`` and not ASCII."""
        in_string, rest = False, b""
        string_size, is_wide = 0, False  # of the string in which the piece ends
        for start in range(0, len(text), PIECE_SIZE):
            piece = rest + text[start : start + PIECE_SIZE]
            rest = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
            if b"\\" in piece:
                piece = piece.removesuffix(rest).replace(b"\\\\", b"").replace(b'\\"', b"")
            parts = piece.translate(None, NOT_STRUCTURE).split(b'"')
            outside = b"".join(parts[in_string::2])
            in_string ^= len(parts) % 2 == 0
            if len(parts) > 1:
                string_size, is_wide = 0, False
            if in_string:
                end = piece[piece.rfind(b'"') + 1 :]
                string_size += len(end)
                is_wide = is_wide or not end.isascii() or b"\\u" in end
                if is_wide and string_size > MAX_WIDE_TEXT:
                    raise invalid(
                        self._field, f"has a text of more than {MAX_WIDE_TEXT} bytes that is not ASCII", MAX_WIDE_TEXT
                    )
            self._objects += outside.count(b"{") + outside.count(b"[")
            self._members += outside.count(b":")
            self._values += outside.count(b",")
            self._quotes += len(parts) - 1
            self._check()

    @property
    def memory(self) -> int:
        """About how many bytes the elements take once they are parsed, without their characters."""
        return OBJECT_BYTES * self._objects + VALUE_BYTES * (self._members + self._values)

    def _check(self) -> None:
        for count, maximum, what in (
            (self._objects, MAX_OBJECTS, "objects and arrays"),
            (self._members, MAX_MEMBERS, "members of objects"),
            (self._values, MAX_VALUES, "values"),
            (self._quotes // 2, MAX_MEMBERS + MAX_VALUES, "texts"),
        ):
            if count > maximum:
                raise invalid(self._field, f"has more than {maximum} {what}", maximum)


def check_elements(body: bytes) -> int:
    """Count the elements of a JSON text; about how many bytes it takes once it is parsed. Raises as
    ``ElementCount.add``."""
    count = ElementCount()
    count.add(body)
    return len(body) + count.memory
