"""HTTP/1.1 message framing: the head of a request and its chunked body, checked before httptools parses them.

Every byte of a connection is assigned to a message here. httptools parses the same bytes for the application; the
connection is closed if the two disagree where a message ends.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import httptools

HEAD_END = b"\r\n\r\n"
BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE"))
"""Supported methods. CONNECT is excluded, as httptools treats the bytes after its head as another protocol."""
REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]+) (HTTP/[0-9]\.[0-9])")
FIELD_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
LENGTH = re.compile(rb"[0-9]{1,18}")
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
MAX_CHUNK_LINE = 4096
"""Maximum length in bytes of a chunk size line with its extensions, and of a trailer."""
MAX_QUOTED = 100
"""Maximum number of characters quoted from a request in an error message."""
PARSE_SIZE = 4096
"""Maximum number of bytes of small chunks that are passed to the parser at a time."""
FRAMING_FIELDS = frozenset((b"connection", b"content-length", b"expect", b"host", b"transfer-encoding", b"upgrade"))
MAX_KEPT = 4096
"""Maximum total size in bytes of the header fields kept from a rejected head."""


class FramingError(Exception):
    """A request that is malformed, or uses an unsupported HTTP feature.

    Args:
        status: HTTP status of the response.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Head(NamedTuple):
    """The checked head of a request."""

    raw: bytes
    """The head for httptools, without ``Upgrade``, which would make httptools drop the body."""
    length: int
    """Body length in bytes; 0 if ``chunked``."""
    chunked: bool


def check_head(raw: bytes) -> Head:
    """Check a head that includes the final empty line. Raises ``FramingError``."""
    first, *lines = raw[: -len(HEAD_END)].split(b"\r\n")
    version = _check_request_line(first)
    kept, hosts, lengths, encodings = [first], 0, [], []
    for line in lines:
        matched = FIELD_LINE.fullmatch(line)
        if not matched:
            raise FramingError(f"headers: the line {_quoted(line)} is not NAME: VALUE")
        name, value = matched[1].lower(), matched[2].rstrip(b" \t")
        if name == b"upgrade":
            continue
        kept.append(line)
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            encodings.append(value)
    if hosts > 1 or (hosts == 0 and version == b"HTTP/1.1"):
        raise FramingError(f"headers: Host must occur once, but occurs {hosts} times")
    if len(lengths) > 1 or (lengths and not LENGTH.fullmatch(lengths[0])):
        given = _quoted(b", ".join(lengths))
        raise FramingError(f"headers: Content-Length must occur once and be a decimal number, is {given}")
    if encodings:
        if lengths:
            raise FramingError("headers: Content-Length and Transfer-Encoding cannot be combined; send only one")
        if version == b"HTTP/1.0":
            raise FramingError("headers: HTTP/1.0 does not support Transfer-Encoding; use HTTP/1.1")
        if len(encodings) > 1 or encodings[0].lower() != b"chunked":
            message = f"headers: Transfer-Encoding {_quoted(b', '.join(encodings))} is not supported; use chunked"
            raise FramingError(message, 501)
    return Head(b"\r\n".join([*kept, b"", b""]), int(lengths[0]) if lengths else 0, bool(encodings))


def substitute_head(raw: bytes) -> bytes:
    """Build a valid head from a rejected head: method, path, and well-formed header fields unrelated to framing.
    ``GET /`` if the request line is malformed."""
    first, *lines = raw.split(b"\r\n")
    matched = REQUEST_LINE.fullmatch(first)
    method, target = (matched[1], matched[2]) if matched else (b"GET", b"/")
    try:
        path = httptools.parse_url(target).path or b"/"
    except httptools.HttpParserInvalidURLError:
        path = b"/"
    kept, size = [], 0
    for line in lines:
        field = FIELD_LINE.fullmatch(line)
        if field and field[1].lower() not in FRAMING_FIELDS and size + len(line) <= MAX_KEPT:
            kept.append(line)
            size += len(line)
    request_line = b" ".join((method if method in METHODS else b"GET", path, b"HTTP/1.1"))
    return b"\r\n".join([request_line, *kept, b"connection: close", b"", b""])


class Chunks:
    """Decoder state of a chunked body. Trailers are checked and dropped."""

    def __init__(self) -> None:
        self.ended = False
        self._left = 0
        """Number of bytes of the current chunk that have not arrived, including the line break after the chunk."""
        self._in_trailers = False

    def take(self, data: bytes, start: int) -> tuple[bytes, int]:
        """Return the next bytes for httptools, and the index in ``data`` up to which bytes were consumed.

        The index is ``start`` if the rest of a line has not arrived. Raises ``FramingError``.
        """
        at = fed = start
        while not self.ended and at - start < PARSE_SIZE:
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at = fed = at + step
                if self._left:
                    break
                continue
            end = data.find(b"\r\n", at)
            if (len(data) if end < 0 else end) - at > MAX_CHUNK_LINE:
                raise FramingError(f"body: a line of the chunked encoding exceeds {MAX_CHUNK_LINE} bytes")
            if end < 0:
                break
            is_trailer = self._in_trailers
            self._read_line(data[at:end])
            at = end + 2
            fed = fed if is_trailer else at
        return data[start:fed] + (b"\r\n" if self.ended else b""), at

    def _read_line(self, line: bytes) -> None:
        if self._in_trailers:
            if line and not FIELD_LINE.fullmatch(line):
                raise FramingError(f"body: the trailer {_quoted(line)} is not NAME: VALUE")
            self.ended = not line
            return
        matched = CHUNK_LINE.fullmatch(line)
        if not matched:
            raise FramingError(f"body: {_quoted(line)} is not a hexadecimal chunk size")
        size = int(matched[1], 16)
        self._left = size + 2 if size else 0
        self._in_trailers = not size


def _check_request_line(line: bytes) -> bytes:
    """Check a request line, and return its HTTP version. Raises ``FramingError``."""
    matched = REQUEST_LINE.fullmatch(line)
    if not matched:
        raise FramingError(f"the request line {_quoted(line)} is not METHOD PATH HTTP/1.1")
    method, target, version = matched.groups()
    if version not in (b"HTTP/1.0", b"HTTP/1.1"):
        raise FramingError(f"{version.decode()} is not supported; use HTTP/1.1", 505)
    if method not in METHODS:
        known = b", ".join(sorted(METHODS)).decode()
        raise FramingError(f"the method {method.decode()} is not supported; supported are {known}", 501)
    try:
        path = httptools.parse_url(target).path
    except httptools.HttpParserInvalidURLError:
        path = None
    if not path:
        raise FramingError(f"the request line has no path: {_quoted(target)}")
    return version


def _quoted(text: bytes) -> str:
    shown = text[:MAX_QUOTED].decode("latin-1")
    return ascii(shown) + ("..." if len(text) > MAX_QUOTED else "")
