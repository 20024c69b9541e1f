"""HTTP/1.1 framing for any split into packets: the head determines the body's end; no body is executed as a request."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import uvicorn
from conftest import Servers
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served
from uvicorn.server import ServerState

from penstock.serve.http.protocol import protocol

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
MAX_HEAD = 1000


def post(*lines: str, version: str = "1.1", length: bool = True, host: str = "host: x\r\n") -> bytes:
    """Return the head of a request with the body ``SMUGGLED``."""
    fields = [*lines, f"content-length: {len(SMUGGLED)}"] if length else list(lines)
    return f"POST /first HTTP/{version}\r\n{host}{''.join(f'{line}{chr(13)}{chr(10)}' for line in fields)}\r\n".encode()


class Exchange(NamedTuple):
    """Requests and responses on one connection."""

    requests: list[tuple[str, str, bytes]]
    """(method, path, body) of each request that the application answered."""
    refusals: list[tuple[str, int]]
    """(path, status) of each request refused because of its head."""
    statuses: list[int]
    """Status code of each response."""


async def exchange(packets: Sequence[bytes]) -> Exchange:
    """Send packets on a new connection to a server in this process; read until the server closes the connection."""
    result = Exchange([], [], [])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, status = b"", 200
        if refused := scope.get("penstock.refused"):
            status = refused.status
            result.refusals.append((scope["path"], status))
        else:
            more = True
            try:
                while more and (message := await receive())["type"] == "http.request":
                    body, more = body + message["body"], message["more_body"]
                result.requests.append((scope["method"], scope["path"], body))
            except Exception:
                status = 400
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    kind = protocol(60.0, MAX_HEAD)
    config = uvicorn.Config(app, http=kind, lifespan="off", log_config=None, ws="none")
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: kind(config, ServerState(), {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        try:
            for packet in packets:
                writer.write(packet)
                await asyncio.sleep(0)  # yield to the server, so that it reads each packet separately
                await asyncio.sleep(0)
            async with asyncio.timeout(30):
                received = await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
    result.statuses.extend(int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", received))
    return result


FIRST = ("POST", "/first", SMUGGLED)
AFTER = ("GET", "/next", b"")
READ = {
    "content-length": post() + SMUGGLED,
    "upgrade": post("Connection: Upgrade", "Upgrade: h2c") + SMUGGLED,
    "upgrade by Java": post("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA") + SMUGGLED,
    "upgrade to websocket": post("connection: keep-alive, upgrade", "upgrade:websocket") + SMUGGLED,
    "two upgrades": post("upgrade: a", "connection: upgrade", "Upgrade:\th2c", "UPGRADE: b") + SMUGGLED,
    "chunks": post("transfer-encoding: Chunked ", length=False) + CHUNKED,
    "chunks and upgrade": post("Transfer-Encoding: chunked", "connection: upgrade", "upgrade: h2c", length=False)
    + CHUNKED,
    "chunk extensions": post("transfer-encoding: chunked", length=False) + CHUNKED.replace(b"\r\n", b';a="b";c\r\n', 1),
    "trailers": post("transfer-encoding: chunked", length=False)
    + CHUNKED[:-2]
    + b"Content-Length: 1\r\nUpgrade: h2c\r\nConnection: upgrade\r\nx:\r\n\r\n",
    "small chunks": post("transfer-encoding: chunked", length=False)
    + b"".join(b"1\r\n%c\r\n" % byte for byte in SMUGGLED)
    + b"00\r\n\r\n",
    "empty lines before": b"\r\n\r\n" + post() + SMUGGLED,
}
"""Requests with the body ``SMUGGLED``, by their special property."""
REFUSED = {
    "gzip": (post("transfer-encoding: gzip, chunked", length=False) + CHUNKED, 501),
    "identity": (post("transfer-encoding: identity", length=False) + SMUGGLED, 501),
    "two encodings": (post("transfer-encoding: chunked", "transfer-encoding: chunked", length=False) + CHUNKED, 501),
    "length and encoding": (post("transfer-encoding: chunked") + SMUGGLED, 400),
    "encoding of HTTP/1.0": (post("transfer-encoding: chunked", version="1.0", length=False) + CHUNKED, 400),
    "two lengths": (post("content-length: 0") + SMUGGLED, 400),
    "two equal lengths": (post(f"content-length: {len(SMUGGLED)}") + SMUGGLED, 400),
    "list of lengths": (post("content-length: 0, 0", length=False) + SMUGGLED, 400),
    "signed length": (post("content-length: +0", length=False) + SMUGGLED, 400),
    "hexadecimal length": (post("content-length: 0x0", length=False) + SMUGGLED, 400),
    "no length": (post("content-length:", length=False) + SMUGGLED, 400),
    "length of 4,301 digits": (post("content-length: " + "0" * 500, length=False) + SMUGGLED, 400),
    "folded line": (post("x: y", " content-length: 0", length=False) + SMUGGLED, 400),
    "space before a colon": (post("content-length : 0", length=False) + SMUGGLED, 400),
    "no colon": (post("content-length", length=False) + SMUGGLED, 400),
    "NUL": (post("x: \0") + SMUGGLED, 400),
    "bare carriage return": (post("x: a\rcontent-length: 0", length=False) + SMUGGLED, 400),
    "bare line feed": (post("x: a\ncontent-length: 0", length=False) + SMUGGLED, 400),
    "bare line feeds only": (post(length=False).replace(b"\r\n", b"\n") + SMUGGLED, 400),
    "no host": (post(host="") + SMUGGLED, 400),
    "two hosts": (post("Host: y") + SMUGGLED, 400),
    "HTTP/2.0": (post(version="2.0") + SMUGGLED, 505),
    "HTTP/0.9 with a version": (post(version="0.9") + SMUGGLED, 505),
    "CONNECT": (post().replace(b"POST /first", b"CONNECT x:1") + SMUGGLED, 501),
    "unknown method": (post().replace(b"POST", b"PURGE") + SMUGGLED, 501),
    "HTTP/0.9": (b"GET /first\r\n\r\n" + SMUGGLED, 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED, 505),
    "two spaces": (post().replace(b" /", b"  /") + SMUGGLED, 400),
    "not ASCII": (post().replace(b"/first", b"/f\xc3\xa9") + SMUGGLED, 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n" + SMUGGLED, 400),
    "large head": (post("x: " + "y" * MAX_HEAD) + SMUGGLED, 431),
    "large head without an end": (post("x: " + "y" * MAX_HEAD)[:-4], 431),
}
"""Requests refused because of their head, with the expected status."""
BROKEN = {
    "chunk size": b"g\r\n" + SMUGGLED,
    "empty size": b"\r\n" + SMUGGLED,
    "signed size": b"+1\r\n" + SMUGGLED,
    "prefixed size": b"0x0\r\n\r\n" + SMUGGLED,
    "size with a space": b"0 \r\n\r\n" + SMUGGLED,
    "size of many digits": b"0" * 40 + b"\r\n\r\n" + SMUGGLED,
    "line feed after the size": b"0\n\n" + SMUGGLED,
    "line feed in an extension": b"1;a\nx\r\n0\r\n\r\n" + SMUGGLED,
    "no line break after a chunk": b"1\r\nx0\r\n\r\n" + SMUGGLED,
    "folded trailer": b"0\r\na: b\r\n c\r\n\r\n" + SMUGGLED,
    "trailer without a colon": b"0\r\na\r\n\r\n" + SMUGGLED,
    "long extension": b"1;" + b"a" * 5000,
    "framing without a body": b"1;" + b"a" * 1000 + b"\r\nx\r\n" + b"1;" + b"a" * 1000 + b"\r\nx\r\n",
}
"""Malformed chunked bodies, by fault."""


@pytest.mark.parametrize("name", READ)
def test_body_is_read_completely_at_every_split(name: str) -> None:
    data = READ[name] + NEXT
    step = 1 if len(data) < 400 else 7
    for split_at in range(0, len(data), step):
        result = asyncio.run(exchange([data[:split_at], data[split_at:]]))
        assert result == Exchange([FIRST, AFTER], [], [200, 200]), split_at


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_head_is_refused_at_every_split(name: str) -> None:
    data, status = REFUSED[name]
    for split_at in range(0, len(data), 1 if len(data) < 250 else 17):
        result = asyncio.run(exchange([data[:split_at], data[split_at:]]))
        assert not result.requests, split_at
        assert [code for _, code in result.refusals] == [status], split_at
        assert result.statuses == [status], split_at
    result = asyncio.run(exchange([NEXT.replace(b"connection: close\r\n", b""), data]))
    assert [path for _, path, _ in result.requests] == ["/next"], "the request before the refused one must be answered"


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_chunked_body_ends_the_connection(name: str) -> None:
    head = post("transfer-encoding: chunked", length=False)
    for split_at in range(len(head), len(head) + min(len(BROKEN[name]), 40)):
        data = head + BROKEN[name]
        result = asyncio.run(exchange([data[:split_at], data[split_at:]]))
        assert (result.requests, result.refusals) == ([], []), split_at
        assert result.statuses == [400], split_at


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """Strategy: a request with the body ``SMUGGLED`` and a second request, with offsets at which to split the bytes."""
    fields = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["Upgrade", "uPGRADE", "Connection", "Expect", "X", "Te", "Trailer", "Keep-Alive"]),
                st.sampled_from(["", " "]),
                st.sampled_from(["h2c", "upgrade", "Upgrade, HTTP2-Settings", "keep-alive", "websocket", "\t", "x"]),
            ),
            max_size=6,
        )
    )
    lines = [f"{name}:{space}{value}" for name, space, value in fields]
    chunked = draw(st.booleans())
    lines.insert(draw(st.integers(0, len(lines))), "transfer-encoding: chunked") if chunked else None
    body = CHUNKED if chunked else SMUGGLED
    data = post(*lines, length=not chunked) + body + NEXT
    return data, sorted(draw(st.lists(st.integers(0, len(data)), max_size=5)))


@settings(max_examples=150, deadline=None)
@given(requests())
def test_headers_and_splits_do_not_change_end_of_body(drawn: tuple[bytes, list[int]]) -> None:
    data, splits = drawn
    bounds = [0, *splits, len(data)]
    result = asyncio.run(exchange([data[start:end] for start, end in itertools.pairwise(bounds)]))
    assert result.requests == [FIRST, AFTER]


# --- A server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(servers: Servers) -> Iterator[Served]:
    yield servers.get("--num-gpu-blocks-override", "400")


def talk(served: Served, *packets: bytes) -> bytes:
    """Send packets; return all bytes that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(served.root.rpartition(":")[2])), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in packets:
            connection.sendall(packet)
        received = b""
        while more := connection.recv(2**16):
            received += more
    return received


@pytest.mark.parametrize("split", ["Upgr", "Upgrade: h", "\r\nUp", "Connection: Upgrade\r"])
def test_server_does_not_execute_a_body(server: Served, split: str) -> None:
    inner = b"GET /version?smuggled HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    text = json.dumps({"prompt": "x", "max_tokens": 1, "user": inner.decode()}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n"
        "Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    )
    split_at = head.index(split) + len(split)
    received = talk(server, head[:split_at].encode(), head[split_at:].encode() + text + NEXT)
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", received)] == [200, 404]  # /next does not exist


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "error"), ("/v1/messages", "error"), ("/generate", "error")]
)
def test_refused_head_is_answered_as_json_and_logged(server: Served, path: str, field: str) -> None:
    before = len(server.lines)
    received = talk(server, f"POST {path} HTTP/1.1\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head
    assert "Host must occur once" in str(json.loads(body)[field])
    assert server.find(re.escape(path) + ".*Host must occur once", before)


def test_http_client_can_read_error_for_large_head(server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.root.rpartition(":")[2]), timeout=60)
    connection.request("GET", "/v1/models", headers={"x": "y" * 70_000})
    answer = connection.getresponse()
    assert answer.status == 431
    assert "at most 65536 bytes" in json.load(answer)["error"]["message"]
    connection.close()
