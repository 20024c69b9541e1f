"""Tools of MCP servers in one response: connections, tool lists and calls."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.core import Code, PenstockError
from penstock.frontend.mcp import McpConnection, McpConnections, McpError, McpTool
from penstock.serve.chat.request import TOOL_NAME

from .convert import qualified
from .mcp_servers import RequestedServer
from .schema import Tool

if TYPE_CHECKING:
    from penstock.tracing import Span

MAX_CONCURRENT_CALLS = 8
"""Maximum number of calls of a response that run at the same time."""
MAX_CALLS = 128
"""Maximum number of calls of a response; also the maximum of ``max_tool_calls``."""
logger = logging.getLogger(__name__)


class FoundTool(NamedTuple):
    """A tool of an MCP server that the model has called."""

    label: str
    """Label of the server."""
    name: str
    needs_approval: bool


class CallResult(NamedTuple):
    """Result of a call: either the output or the error is None."""

    output: str | None
    error: str | None


class McpToolset:
    """MCP servers of one response. Each server is connected when it is first used; ``close`` ends all connections.

    Args:
        max_calls: maximum number of calls.
        span: trace span of the request.
    """

    def __init__(
        self,
        servers: Iterable[RequestedServer],
        connections: McpConnections,
        max_calls: int | None = None,
        span: Span | None = None,
    ) -> None:
        self.servers = {server.label: server for server in servers}
        self._all_connections = connections
        self._span = span
        self._connections: dict[str, asyncio.Task[McpConnection]] = {}
        self._tools: dict[str, dict[str, McpTool]] = {}
        """Tools that the model may call, by name, by server label."""
        self.size = 0
        """Size of the tool definitions in bytes of JSON."""
        self._max_calls = MAX_CALLS if max_calls is None else min(max_calls, MAX_CALLS)
        self._num_calls = 0
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    @property
    def prompt_tools(self) -> dict[str, Tool]:
        """The tools of each server for the prompt, as a namespace, by server label."""
        return {
            label: Tool(type="namespace", name=label, tools=list(map(_function, tools.values())))
            for label, tools in self._tools.items()
        }

    def find(self, called: str) -> FoundTool | None:
        """Find the tool that the model has called. A name that the server does not have is found, too: its call fails,
        so that the model can correct it.

        Args:
            called: name in the prompt.
        """
        found: FoundTool | None = None
        for label, tools in self._tools.items():
            name = called.removeprefix(qualified(label, ""))
            if name in tools and name != called:
                return FoundTool(label, name, self.servers[label].needs_approval(tools[name]))
            if name != called:
                found = FoundTool(label, name, needs_approval=False)
        return found

    async def load(self, label: str) -> list[McpTool]:
        """List the tools of a server that the request allows.

        Raises ``PenstockError``: ``unavailable`` if the server cannot be reached, ``overloaded`` if too many
        connections are open.
        """
        server, begun = self.servers[label], time.monotonic()
        span = self._span.child("list_tools", begun, {"mcp.server": label}) if self._span else None
        try:
            tools = await (await self._connection(label)).list_tools()
        except McpError as error:
            if span:
                span.fail(Code.UNAVAILABLE.value, str(error))
            message = f"{server.path}: the tools of the MCP server {label!r} cannot be listed: {error}"
            raise PenstockError(Code.UNAVAILABLE, message, server.path) from error
        finally:
            if span:
                span.end()
        return self.use(label, tools)

    def use(self, label: str, tools: Iterable[McpTool]) -> list[McpTool]:
        """Let the model call those of a server's tools that the request allows; returns them."""
        allowed = {tool.name: tool for tool in tools if self.servers[label].allows(tool)}
        usable = {name: tool for name, tool in allowed.items() if re.match(TOOL_NAME, qualified(label, name))}
        if unusable := allowed.keys() - usable.keys():
            logger.warning("tools of the MCP server %s have names that models cannot call: %s", label, unusable)
        self._tools[label] = usable
        self.size += len(msgspec.json.encode(usable))
        return list(usable.values())

    async def call(self, label: str, name: str, arguments: str) -> CallResult:
        """Call a tool. Failures become the error of the result, which the model sees.

        Args:
            arguments: arguments as JSON text, as generated by the model.
        """
        if name not in self._tools.get(label, {}):
            return CallResult(None, f"the server {label} has no tool {name:.100}, or the request does not allow it")
        self._num_calls += 1
        if self._num_calls > self._max_calls:
            return CallResult(None, f"the maximum of {self._max_calls} tool calls is reached: answer without calls")
        async with self._slots:
            return await self._traced_call(label, name, arguments)

    def close(self) -> None:
        """End all connections; server processes end in the background."""
        for connecting in self._connections.values():
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()
            else:
                connecting.cancel()

    async def _traced_call(self, label: str, name: str, arguments: str) -> CallResult:
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "extension",
            "mcp.server": label,
        }
        span = self._span.child(f"execute_tool {name}", time.monotonic(), attributes) if self._span else None
        error = "the call was cancelled"
        try:
            output = await (await self._connection(label)).call(name, _arguments(arguments))
            error = ""
            return CallResult(output, None)
        except (McpError, PenstockError) as failure:
            error = str(failure)
            return CallResult(None, error)
        finally:
            if span:
                if error:
                    span.fail("tool_error", error)
                span.end()

    async def _connection(self, label: str) -> McpConnection:
        """Connection to a server, which is opened with the first call. Raises as ``McpConnections.connect``."""
        connecting = self._connections.get(label)
        if connecting is None or (connecting.done() and connecting.exception() is not None):
            connect = self._all_connections.connect(self.servers[label].server)
            connecting = self._connections[label] = asyncio.create_task(connect)
        return await asyncio.shield(connecting)


def _function(tool: McpTool) -> Tool:
    return Tool(type="function", name=tool.name, description=tool.description, parameters=tool.input_schema)


def _arguments(text: str) -> dict[str, Any]:
    """Decode the arguments of a call. Raises ``McpError`` if they are no JSON object."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise McpError(f"the arguments are not a JSON object: {error}") from error
