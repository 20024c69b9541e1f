"""Request bodies: reading with limits on size, time and memory, JSON parsing, and conversion to schemas."""

from __future__ import annotations

import asyncio
import codecs
import contextvars
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.fair_lock import FairLock
from penstock.frontend.fair_queue import FairQueue

from .body_memory import UNCOUNTED_SIZE, BodyMemory, Reservation
from .lax import Lax, convert_types, literals_at
from .request_record import record_of
from .unknown_fields import UnknownFields

JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for text that is not JSON or does not match the schema."""
HALF_AT_END = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]{1,5}$")
"""Escape of a high surrogate so close to the end that msgspec reports truncated text."""

MIN_RATE = 2**17
"""Minimum rate in bytes per second for a body that reserves memory, after ``timeout`` seconds."""
MAX_INLINE_SIZE = 2**14
"""Maximum size in bytes of a body that is parsed in the event loop; larger bodies are parsed in a thread."""
MAX_OBJECTS = 2**16
"""Maximum number of objects and arrays in a JSON body."""
MAX_MEMBERS = 2**18
"""Maximum number of members of all objects in a JSON body."""
MAX_VALUES = 2**20
"""Maximum number of values in a JSON body, estimated by the number of commas."""
MAX_WIDE_TEXT = 2**24
"""Approximate maximum size in bytes of a string with non-ASCII characters. Decoding it (up to 4 bytes per character)
blocks all other threads: 64 MiB take 0.4 s."""
OBJECT_BYTES, VALUE_BYTES = 400, 64
"""Approximate memory of a parsed object or array, and of a member or value, in bytes."""
CHUNK_SIZE = 2**16
"""Number of bytes scanned at a time; other threads can run in between."""
STRUCTURE = b'"\\{[:,'
NOT_STRUCTURE = bytes(set(range(256)) - set(STRUCTURE))


class Unsupported(NamedTuple):
    """A field of the dialect's original server that is not supported: requests with it are rejected."""

    reason: str
    neutral: tuple[Any, ...] = ()
    """Values without effect, which are accepted in addition to null."""
    code: Code = Code.UNSUPPORTED


def unsupported(neutral: Mapping[str, tuple[Any, ...]], reason: str = "not supported yet") -> dict[str, Unsupported]:
    """Return unsupported fields with the same reason; ``neutral`` has the accepted values of each."""
    return {name: Unsupported(reason, values) for name, values in neutral.items()}


class Reading(NamedTuple):
    """Rules for reading the bodies of a schema."""

    lax: Lax = "pydantic"
    """Type conversions of the dialect's original server."""
    unsupported: Mapping[str, Unsupported] = {}
    """Fields that are rejected."""
    ignored: frozenset[str] = frozenset()
    """Fields without effect that are not reported as unknown."""
    drops_null: bool = False
    """Treat null as absent."""

    def accepting(self, schema: type[RequestBody]) -> Reading:
        """Return these rules without the unsupported fields that ``schema`` defines."""
        known = schema.__struct_fields__
        return self._replace(unsupported={name: one for name, one in self.unsupported.items() if name not in known})


class RequestBody(msgspec.Struct, kw_only=True):
    """Base class of all request schemas."""

    reading: ClassVar[Reading] = Reading()


T = TypeVar("T", bound=RequestBody)
V = TypeVar("V")


async def body_parts(request: Request, max_size: int, timeout: float) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a request's body as they arrive.

    Args:
        max_size: maximum size of the body in bytes.
        timeout: maximum time between two parts in seconds.

    Raises ``PenstockError``: ``too_large``; ``timeout`` if the client stops sending; ``cancelled`` if it disconnects.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_size:
        raise _too_large(max_size)
    size = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(timeout):
                part = await anext(stream, None)
        except TimeoutError as error:
            message = f"nothing was received for {timeout:g} seconds"
            raise PenstockError(Code.TIMEOUT, f"body: {message}", "body", timeout) from error
        except ClientDisconnect as error:
            raise PenstockError(Code.CANCELLED, "the client disconnected while sending its request") from error
        if part is None:
            return
        size += len(part)
        if size > max_size:
            raise _too_large(max_size)
        yield part


async def read_body(request: Request, max_size: int, timeout: float) -> bytes:
    """Read the whole body of a request. Arguments and errors as in ``body_parts``."""
    return b"".join([part async for part in body_parts(request, max_size, timeout)])


async def receive_body(request: Request, max_size: int, timeout: float, memory: BodyMemory) -> bytes:
    """Read the whole body of a request, and reserve its memory until the request ends. Reading a body with
    Content-Length begins when there is memory for it.

    Raises ``PenstockError``: as ``body_parts``; ``overloaded`` if the memory budget is exhausted; ``timeout`` if the
    body arrives at less than ``MIN_RATE``.
    """
    record = record_of(request.scope)
    length = request.headers.get("content-length", "")
    expected = int(length) if length.isdecimal() else 0
    if UNCOUNTED_SIZE < expected <= max_size:
        record.memory = await memory.reserve(record.sender, expected, timeout)
    body, started = bytearray(), time.monotonic()
    async for part in body_parts(request, max_size, timeout):
        body += part
        size = len(body)
        if size > max(UNCOUNTED_SIZE, expected):
            record.memory = record.memory or Reservation(memory, record.sender)
            record.memory.resize(size)
        late = time.monotonic() - started - timeout
        if record.memory and late > 0 and size < late * MIN_RATE:
            message = f"body: {size} bytes arrived in {late + timeout:.0f} seconds, less than {MIN_RATE} per second"
            raise PenstockError(Code.TIMEOUT, message, "body", timeout)
    return cast(bytes, body)  # a copy would block the event loop for tens of milliseconds


class BodyParser:
    """Parses bodies: small bodies in the event loop, one per iteration; large bodies in a thread, one at a time. Serves
    clients round-robin."""

    def __init__(self) -> None:
        self._small = FairQueue()
        self._large = FairLock()
        self._thread = ThreadPoolExecutor(1, "parse")

    async def parse(self, client: str, size: int, work: Callable[[], V]) -> V:
        """Run ``work`` on a body of ``size`` bytes, in a thread if it is large."""
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
        field: field of the request that contains the texts, for errors.
    """

    def __init__(self, field: str = "body") -> None:
        self._field = field
        self._objects = self._members = self._values = self._quotes = 0

    def add(self, text: bytes) -> None:
        """Count a text. Raises ``PenstockError`` (``invalid``) if all texts together exceed ``MAX_OBJECTS``,
        ``MAX_MEMBERS`` or ``MAX_VALUES``, or a non-ASCII string exceeds ``MAX_WIDE_TEXT``."""
        in_string, rest = False, b""
        string_size, is_wide = 0, False  # they describe the string at the end of the chunk
        for start in range(0, len(text), CHUNK_SIZE):
            chunk = rest + text[start : start + CHUNK_SIZE]
            rest = b"\\" if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 else b""
            if b"\\" in chunk:
                chunk = chunk.removesuffix(rest).replace(b"\\\\", b"").replace(b'\\"', b"")
            parts = chunk.translate(None, NOT_STRUCTURE).split(b'"')
            outside = b"".join(parts[in_string::2])
            in_string ^= len(parts) % 2 == 0
            if len(parts) > 1:
                string_size, is_wide = 0, False
            if in_string:
                end = chunk[chunk.rfind(b'"') + 1 :]
                string_size += len(end)
                is_wide = is_wide or not end.isascii() or b"\\u" in end
                if is_wide and string_size > MAX_WIDE_TEXT:
                    message = f"has a string of more than {MAX_WIDE_TEXT} bytes that is not ASCII"
                    raise invalid(self._field, message, MAX_WIDE_TEXT)
            self._objects += outside.count(b"{") + outside.count(b"[")
            self._members += outside.count(b":")
            self._values += outside.count(b",")
            self._quotes += len(parts) - 1
            self._check()

    @property
    def memory(self) -> int:
        """Approximate memory of the parsed elements in bytes, without their characters."""
        return OBJECT_BYTES * self._objects + VALUE_BYTES * (self._members + self._values)

    def _check(self) -> None:
        for count, maximum, what in (
            (self._objects, MAX_OBJECTS, "objects and arrays"),
            (self._members, MAX_MEMBERS, "members of objects"),
            (self._values, MAX_VALUES, "values"),
            (self._quotes // 2, MAX_MEMBERS + MAX_VALUES, "strings"),
        ):
            if count > maximum:
                raise invalid(self._field, f"has more than {maximum} {what}", maximum)


def check_elements(body: bytes) -> int:
    """Check the number of elements of a JSON text, and return its approximate memory when parsed, in bytes. Raises as
    ``ElementCount.add``."""
    count = ElementCount()
    count.add(body)
    return len(body) + count.memory


def decode_json(data: bytes, field: str) -> Any:
    """Decode a JSON text, which may begin with a byte order mark. Raises ``PenstockError`` (``invalid``) if it is not
    JSON."""
    try:
        return msgspec.json.decode(without_mark(data))
    except JSON_ERRORS as error:
        raise invalid(field, f"is not JSON: {json_problem(data, error)}") from error


def without_mark(data: bytes) -> bytes:
    """Remove a UTF-8 byte order mark, which some editors and clients write."""
    if not data.startswith(codecs.BOM_UTF8):
        return data  # removeprefix would copy a bytearray (large bodies)
    return data[len(codecs.BOM_UTF8) :]


def json_problem(data: bytes, error: Exception) -> str:
    """Explain why a text is not JSON."""
    message = str(error)
    if "surrogate" in message or ("truncated" in message and HALF_AT_END.search(data[-16:])):
        at = re.search(r"byte \d+", message)
        where = at[0] if at else "at the end"
        return f"an escape from \\ud800 to \\udfff is half of a surrogate pair without the other half ({where})"
    return message


def read_object(body: bytes) -> dict[str, Any]:
    """Decode a body as a JSON object; its content type is ignored. Raises ``PenstockError`` (``invalid``) if it is no
    JSON object."""
    result = decode_json(body, "body")
    if not isinstance(result, dict):
        raise invalid("body", f"is not a JSON object; it is a {type(result).__name__}")
    return result


def convert(fields: dict[str, Any], schema: type[T], unknown: UnknownFields, lax: Lax | None = None) -> T:
    """Convert a JSON object to a schema. Unknown fields are removed from ``fields``.

    Args:
        unknown: collects the unknown fields.
        lax: overrides the schema's ``lax`` for a request that was converted from another dialect.

    Raises ``PenstockError``: ``invalid`` for wrong values, and for unknown fields with ``strict_requests``; for
    unsupported fields as ``check_supported``.
    """
    reading = schema.reading
    lax = reading.lax if lax is None else lax
    for name in [
        name for name, value in fields.items() if name in reading.ignored or (value is None and reading.drops_null)
    ]:
        del fields[name]
    check_supported(fields, reading.unsupported)
    for name in reading.unsupported.keys() - schema.__struct_fields__:
        fields.pop(name, None)
    try:
        unknown.remove(fields, schema)
        try:
            return msgspec.convert(fields, schema, str_keys=True)
        except msgspec.ValidationError:
            if not lax:
                raise
            convert_types(fields, schema, lax)
            return msgspec.convert(fields, schema, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        if message.startswith("Invalid enum value") and (known := literals_at(schema, field)):
            value = message.removeprefix("Invalid enum value ")
            message = f"{value} is not one of {', '.join(msgspec.json.encode(one).decode() for one in known)}"
        missing_field = re.search(r"field `(\w+)`", message)  # msgspec quotes a missing or unknown field
        raise invalid(field or (missing_field[1] if missing_field else "body"), message) from error


def require(value: V | None, path: str) -> V:
    """Return the value of a required field. Raises ``PenstockError`` (``invalid``) with ``path`` if it is None."""
    if value is None:
        raise invalid(path, "is missing")
    return value


def check_supported(fields: Mapping[str, Any], unsupported: Mapping[str, Unsupported]) -> None:
    """Raise ``PenstockError`` (the code of the field, by default ``unsupported``) for an unsupported field."""
    for name in [name for name in unsupported if fields.get(name) is not None]:
        reason, neutral, code = unsupported[name]
        if fields[name] not in neutral:
            raise PenstockError(code, f"{name}: {reason}", name)


def _too_large(maximum: int) -> PenstockError:
    return PenstockError(Code.TOO_LARGE, f"body: must have at most {maximum} bytes", "body", maximum)
