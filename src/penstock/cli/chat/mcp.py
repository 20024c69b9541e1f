"""Tools of MCP servers in a chat."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Self

import msgspec

from penstock.core import Code, PenstockError
from penstock.frontend.mcp import McpConnection, McpConnections, McpError, McpLimits, load_mcp_config
from penstock.serve.chat.request import TOOL_NAME

from .tools import Function, Tool, ToolCall


class McpTools:
    """The tools of all MCP servers of a configuration file. The servers are connected while the chat runs.

    Args:
        path: path of the configuration file.

    Raises ``PenstockError`` (``invalid``) if the file is malformed.
    """

    def __init__(self, path: str) -> None:
        self._servers = load_mcp_config(path)
        self._connections = McpConnections(McpLimits(max_connections=len(self._servers)))
        self._tools: dict[str, tuple[McpConnection, str]] = {}
        """Connection and name on the server of each tool, by name in the prompt."""
        self.definitions: list[dict[str, Any]] = []
        """Tools in OpenAI's format, named ``SERVER__TOOL``."""

    async def __aenter__(self) -> Self:
        """Connect to all servers. Raises ``PenstockError`` (``unavailable``) if that fails."""
        try:
            await asyncio.gather(*map(self._connect, self._servers))
        except BaseException:
            await self._connections.close()
            raise
        self.definitions.sort(key=lambda tool: str(tool["function"]["name"]))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connections.close()

    def has(self, call: ToolCall) -> bool:
        """True if a call is one of an MCP tool."""
        return call.name in self._tools

    async def call(self, call: ToolCall) -> str:
        """Call a tool; returns its result, or its error, for the model."""
        connection, name = self._tools[call.name]
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
            return await connection.call(name, arguments)
        except (McpError, msgspec.MsgspecError) as error:
            return f"Error: {error}"

    async def _connect(self, label: str) -> None:
        try:
            connection = await self._connections.connect(self._servers[label])
            tools = await connection.list_tools()
        except McpError as error:
            message = f"mcp_config: the MCP server {label} cannot be used: {error}"
            raise PenstockError(Code.UNAVAILABLE, message, "mcp_config") from error
        for tool in tools:
            name = f"{label}__{tool.name}"
            if re.match(TOOL_NAME, name):
                self._tools[name] = connection, tool.name
                definition = Tool(Function(name, tool.description, tool.input_schema))
                self.definitions.append(msgspec.to_builtins(definition))
