"""An MCP server with tools for tests: over standard input and output, or streamable HTTP at a port.

Usage: mcp_tools.py stdio FOLDER, or mcp_tools.py PORT FOLDER. In ``FOLDER``, each run of a tool is recorded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("tools", log_level="CRITICAL")
FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


def record(text: str) -> None:
    """Append a line to the record of calls."""
    with (FOLDER / "calls").open("a") as file:
        file.write(f"{text}\n")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> str:
    """Add two numbers."""
    record(f"add {a} {b}")
    return str(a + b)


@server.tool()
def delete(file: str) -> str:
    """Delete a file."""
    record(f"delete {file}")
    return f"deleted {file}"


@server.tool()
def fail() -> str:
    """Fail."""
    record("fail")
    raise ValueError("broken")


@server.tool()
def big(size: int) -> str:
    """Return a long text."""
    return "x" * size


@server.tool()
def picture() -> Image:
    """Return an image."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
async def wait() -> str:
    """Wait until the call is cancelled, or the server ends."""
    with recorded_end():
        record("wait")
        await anyio.sleep_forever()
    return ""


@server.tool()
def secret(context: Context) -> str:
    """Return a header of the HTTP request, or an environment variable of the process."""
    headers = context.headers
    return os.environ.get("SECRET", "none") if headers is None else headers.get("x-secret", "none")


@contextmanager
def recorded_end() -> Iterator[None]:
    try:
        yield
    finally:
        record("end")


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
