"""Configuration files of MCP servers, and connections with limits to real MCP servers."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import pytest
from repository import TESTS
from serving import free_ports, usage_error

from penstock.core import Code, PenstockError
from penstock.frontend.mcp import (
    HttpServer,
    McpConnections,
    McpError,
    McpLimits,
    Server,
    StdioServer,
    load_mcp_config,
)
from penstock.frontend.mcp.http import http_client

TOOLS = StdioServer(sys.executable, (str(TESTS / "support/mcp_tools.py"), "stdio"))


def use(server: Server, *calls: tuple[str, dict[str, Any]], **limits: Any) -> list[str]:
    """Results or errors of calls of a server's tools."""

    async def run() -> list[str]:
        connections = McpConnections(McpLimits(**limits))
        try:
            connection = await connections.connect(server)
            results = []
            for name, arguments in calls:
                try:
                    results.append(await connection.call(name, arguments))
                except McpError as error:
                    results.append(f"error: {error}")
            return results
        finally:
            await connections.close()

    return asyncio.run(run())


def failure(server: Server, **limits: Any) -> str:
    """Error of a server that cannot be connected."""
    with pytest.raises(McpError) as failed:
        use(server, **limits)
    return str(failed.value)


def test_results_and_errors_of_calls(tmp_path: Path) -> None:
    server = StdioServer(TOOLS.command, (*TOOLS.args, str(tmp_path)))
    calls = [("add", {"a": 2, "b": 3}), ("fail", {}), ("big", {"size": 11}), ("add", {"a": "x"}), ("none", {})]
    results = use(server, *calls, max_result_size=10)
    assert results[0] == "5"
    assert results[1].startswith("error: ") and "fail" in results[1]
    assert results[2] == "error: the result of big has 11 bytes; the maximum is 10 (mcp_max_result_size): ask for less"
    assert "error: " in results[3] and "error: " in results[4]


@pytest.mark.slow
def test_call_beyond_its_time_is_an_error(tmp_path: Path) -> None:
    """The server is told, and can be called again."""
    server = StdioServer(TOOLS.command, (*TOOLS.args, str(tmp_path)))
    results = use(server, ("wait", {}), ("add", {"a": 2, "b": 3}), timeout=20)
    assert results == ["error: no answer within 20 seconds (mcp_timeout)", "5"]
    assert (tmp_path / "calls").read_text().splitlines() == ["wait", "end", "add 2 3"]


def test_failed_connections_say_why() -> None:
    assert failure(StdioServer("/does/not/exist")) == "/does/not/exist No such file or directory"
    assert failure(StdioServer("true"))
    (port,) = free_ports(1)
    assert failure(HttpServer(f"http://127.0.0.1:{port}/mcp")) == "All connection attempts failed"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.1", "169.254.169.254", "[::1]", "[fe80::1]"])
def test_url_of_client_reaches_public_addresses_only(host: str) -> None:
    with recorded_http() as (port, requests):
        message = failure(HttpServer(f"http://{host}:{port}/mcp", public_only=True))
        assert message.endswith("has an address that is not public")
        assert not requests


def test_connections_are_limited(tmp_path: Path) -> None:
    async def run() -> None:
        connections = McpConnections(McpLimits(max_connections=1))
        server = StdioServer(TOOLS.command, (*TOOLS.args, str(tmp_path)))
        connection = await connections.connect(server)
        with pytest.raises(PenstockError) as refused:
            await connections.connect(server)
        assert (refused.value.failure.code, refused.value.failure.limit) == (Code.OVERLOADED, 1)
        connection.close()
        await connection.task
        (await connections.connect(server)).close()
        await connections.close()

    asyncio.run(run())


@contextmanager
def recorded_http() -> Iterator[tuple[int, list[str]]]:
    """A server at a port that records the paths of requests, and answers each with 1,000 bytes or a redirect."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        answers: ClassVar = {"/gzip": {"Content-Encoding": "gzip"}, "/away": {"Location": "http://127.0.0.2/mcp"}}

        def do_POST(self) -> None:
            requests.append(self.path)
            self.send_response(307 if self.path == "/away" else 200)
            for name, value in self.answers.get(self.path, {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b" " * 1000)

        do_GET = do_DELETE = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port, requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_responses_are_bounded_and_redirects_not_followed() -> None:
    async def get(path: str, max_size: int) -> int:
        server = HttpServer(f"http://127.0.0.1:{port}{path}")
        async with http_client(server, max_size, 60) as client:
            return len((await client.get(server.url)).content)

    with recorded_http() as (port, requests):
        assert asyncio.run(get("/", 1000)) == 1000
        with pytest.raises(httpx2.StreamError, match="too large"):
            asyncio.run(get("/", 999))
        with pytest.raises(httpx2.DecodingError, match="compressed"):
            asyncio.run(get("/gzip", 1000))
        assert "edirect" in failure(HttpServer(f"http://127.0.0.1:{port}/away"))
        assert requests.count("/away") >= 1


def write(folder: Path, document: Any) -> str:
    (folder / "mcp.json").write_text(document if isinstance(document, str) else json.dumps(document))
    return str(folder / "mcp.json")


def test_config_of_other_clients_is_read(tmp_path: Path) -> None:
    servers = {
        "files": {"type": "stdio", "command": "mcp-files", "args": ["/data"], "env": {"A": "b"}, "alwaysAllow": []},
        "wiki": {"type": "streamable-http", "url": "https://example.com/mcp", "headers": {"Authorization": "Bearer t"}},
        "off": {"command": "x", "disabled": True},
    }
    loaded = load_mcp_config(write(tmp_path, {"mcpServers": servers, "inputs": []}))
    assert loaded == {
        "files": StdioServer("mcp-files", ("/data",), {"A": "b"}),
        "wiki": HttpServer("https://example.com/mcp", {"Authorization": "Bearer t"}),
    }


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "is not JSON"),
        ({"servers": {}}, "must be a JSON object such as"),
        ({"mcpServers": {"a": {}}}, "mcp_config.a: must have either command or url"),
        ({"mcpServers": {"a": {"command": "b", "url": "http://c"}}}, "must have either command or url"),
        ({"mcpServers": {"a b": {"command": "b"}}}, "must be a name of 1 to 64 letters"),
        ({"mcpServers": {"a": {"url": "http://b", "type": "sse"}}}, "'sse' is not supported"),
        ({"mcpServers": {"a": {"url": "file:///b"}}}, "must be a URL such as"),
        ({"mcpServers": {"a": {"command": "b", "args": "c"}}}, "Expected `array`, got `str`"),
    ],
)
def test_wrong_config_stops_the_start(tmp_path: Path, document: Any, message: str) -> None:
    assert message in usage_error("--mcp-config", write(tmp_path, document))


def test_missing_config_stops_the_start(tmp_path: Path) -> None:
    assert "cannot be read: no such file" in usage_error("--mcp-config", str(tmp_path / "none.json"))
