"""Connections to MCP servers: list tools, call tools, with limits on time, bytes and open connections."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.config.secrets import mask
from penstock.core import Code, PenstockError

from .config import HttpServer, Server
from .http import http_client

if TYPE_CHECKING:  # the extra mcp
    import mcp

MAX_TOOLS = 1000
"""Maximum number of tools of a server."""
MAX_LIST_SIZE = 2**20
"""Maximum size of a server's tool definitions in bytes of JSON."""
CLOSE_TIMEOUT = 10.0
"""Maximum seconds that ``McpConnections.close`` waits for the processes of stdio servers."""
logger = logging.getLogger(__name__)


class McpError(Exception):
    """A connection or call has failed; the text is a message for the model and the client."""


class McpLimits(NamedTuple):
    """Limits of connections and calls."""

    timeout: float = 60.0
    """Maximum seconds to connect, to list tools, and of a call."""
    max_result_size: int = 256 * 2**10
    """Maximum size of a call's result in bytes."""
    max_connections: int = 64
    """Maximum number of open connections."""


class McpTool(msgspec.Struct, frozen=True):
    """A tool of an MCP server."""

    name: str
    input_schema: dict[str, Any]
    """JSON Schema of the arguments."""
    description: str | None = None
    annotations: dict[str, Any] | None = None

    @property
    def is_read_only(self) -> bool:
        """True if the server states that the tool changes nothing."""
        return self.annotations is not None and self.annotations.get("readOnlyHint") is True


class McpConnection:
    """A connection to an MCP server.

    The MCP session runs in a separate task, since its cancel scopes must be entered and left in one task. ``close``
    may be called at any time; the task ends in the background.
    """

    def __init__(self, server: Server, limits: McpLimits) -> None:
        self._server = server
        self._limits = limits
        self._client: mcp.Client | None = None
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self._error: BaseException | None = None
        self.task = asyncio.create_task(self._run())

    async def opened(self) -> None:
        """Wait until the connection is open. Raises ``McpError`` if it fails."""
        await self._opened.wait()
        if self._error is not None:
            raise McpError(_describe(self._error, self._limits.timeout)) from self._error

    async def list_tools(self) -> list[McpTool]:
        """List the tools of the server. Raises ``McpError`` if it fails, or there are too many."""
        tools: list[McpTool] = []
        cursor, size = None, 0
        assert self._client is not None
        try:
            async with asyncio.timeout(self._limits.timeout):
                while True:
                    page = await self._client.list_tools(cursor=cursor)
                    for tool in page.tools:
                        fields = tool.model_dump(by_alias=True, exclude_none=True)
                        size += len(msgspec.json.encode(fields))
                        annotations = fields.get("annotations")
                        tools.append(McpTool(tool.name, fields["inputSchema"], tool.description, annotations))
                    if len(tools) > MAX_TOOLS or size > MAX_LIST_SIZE:
                        raise McpError(f"the server has more than {MAX_TOOLS} tools, or {MAX_LIST_SIZE} bytes of them")
                    if not page.tools or (cursor := page.next_cursor) is None:
                        return tools
        except McpError:
            raise
        except Exception as error:
            raise McpError(_describe(error, self._limits.timeout)) from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; returns its result as text. Raises ``McpError`` if it fails, or the result is too large."""
        limits = self._limits
        assert self._client is not None
        try:
            async with asyncio.timeout(limits.timeout):
                result = await self._client.call_tool(name, dict(arguments))
        except Exception as error:
            raise McpError(_describe(error, limits.timeout)) from error
        text = _text(result)
        if (size := len(text.encode(errors="replace"))) > limits.max_result_size:
            message = f"the result of {name} has {size} bytes; the maximum is {limits.max_result_size}"
            raise McpError(f"{message} (mcp_max_result_size): ask for less")
        if result.is_error:
            raise McpError(text or "the tool failed without a message")
        return text

    def close(self) -> None:
        """End the session. A server that was started as a process is stopped."""
        if self._opened.is_set():
            self._closing.set()
        else:
            self.task.cancel()

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._limits.timeout):
                    self._client = await stack.enter_async_context(await self._new_client(stack))
                self._opened.set()
                await self._closing.wait()
        except BaseException as error:
            self._error = self._error or error
            if isinstance(error, asyncio.CancelledError):
                raise
            if self._opened.is_set():
                logger.warning("MCP connection ended: %s", _describe(error, self._limits.timeout))
        finally:
            self._opened.set()

    async def _new_client(self, stack: AsyncExitStack) -> mcp.Client:
        import mcp

        server, limits = self._server, self._limits
        if not isinstance(server, HttpServer):
            parameters = mcp.StdioServerParameters(
                command=server.command, args=list(server.args), env=dict(server.env), cwd=server.cwd
            )
            return mcp.Client(parameters, cache=None)
        from mcp.client.streamable_http import streamable_http_client

        max_size = 2 * limits.max_result_size + MAX_LIST_SIZE  # JSON escapes enlarge texts
        client = await stack.enter_async_context(http_client(server, max_size, limits.timeout))
        transport = streamable_http_client(server.url, http_client=client, max_sse_event_size=max_size)
        return mcp.Client(transport, cache=None)


class McpConnections:
    """The open connections of a process, up to a maximum number."""

    def __init__(self, limits: McpLimits) -> None:
        importlib.import_module("mcp")  # takes half a second, during which a running event loop would be blocked
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs errors that are also raised, with tracebacks
        self._limits = limits
        self._open: set[McpConnection] = set()

    async def connect(self, server: Server) -> McpConnection:
        """Open a connection, which the caller must close. Raises ``McpError`` if that fails, and ``PenstockError``
        (``overloaded``) if too many connections are open."""
        if len(self._open) >= self._limits.max_connections:
            maximum = self._limits.max_connections
            message = f"{maximum} connections to MCP servers are open; try again later (mcp_max_connections)"
            raise PenstockError(Code.OVERLOADED, message, "mcp_max_connections", maximum)
        connection = McpConnection(server, self._limits)
        self._open.add(connection)
        connection.task.add_done_callback(lambda _: self._open.discard(connection))
        try:
            await connection.opened()
        except BaseException:
            connection.close()
            raise
        return connection

    async def close(self) -> None:
        """Close all connections, and wait for the end of server processes."""
        tasks = [connection.task for connection in self._open]
        for connection in self._open:
            connection.close()
        if tasks:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await asyncio.wait(tasks)


def _text(result: Any) -> str:
    """Text of a ``CallToolResult``. Parts without text are described."""
    parts = [_part_text(part) for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _part_text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource_link":
        return f"[{part.name}: {part.uri}]"
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        return str(text) if text is not None else f"[{part.resource.uri}: binary data is not shown]"
    return f"[{part.type}: {part.mime_type} is not shown]"


def _describe(error: BaseException, timeout: float) -> str:
    """Message of an error of the package ``mcp``, which may be a group of errors, without secrets."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} seconds (mcp_timeout)"
    if isinstance(error, asyncio.CancelledError):
        return "the connection was closed"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or ''} {error.strerror}".strip()
    return mask(str(error)) or type(error).__name__
