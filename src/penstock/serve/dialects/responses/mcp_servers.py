"""MCP servers of a request: those of the server's configuration, and those that the client names by URL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from penstock.config.options import ServerOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.frontend.mcp import (
    HttpServer,
    McpConnections,
    McpLimits,
    McpTool,
    Server,
    StdioServer,
    check_installed,
    load_mcp_config,
)
from penstock.frontend.mcp.config import LABEL, check_url
from penstock.serve.http.body import require

from .schema import ApprovalFilter, Tool, ToolFilter

BUILT_IN = {"web_search": "web_search", "web_search_preview": "web_search", "code_interpreter": "code_interpreter"}
"""Type of a built-in tool of OpenAI → name of the MCP server of the configuration that replaces it."""
FORBIDDEN_HEADERS = frozenset(("host", "content-length", "transfer-encoding", "connection", "accept-encoding"))
"""Headers that the HTTP client sets."""


@dataclass(frozen=True)
class RequestedServer:
    """An MCP server that a request may use, and the tools that it selects."""

    label: str
    server: Server
    path: str
    """Path of the tool in the request, for errors."""
    allowed: ToolFilter
    approval: ApprovalFilter

    def allows(self, tool: McpTool) -> bool:
        return _matches(self.allowed, tool)

    def needs_approval(self, tool: McpTool) -> bool:
        """True if the client must approve each call. Tools that no filter selects need an approval."""
        if self.approval.always is not None and _matches(self.approval.always, tool):
            return True
        return self.approval.never is None or not _matches(self.approval.never, tool)


class McpServers:
    """MCP servers of an API process.

    Args:
        servers: servers of the configuration file, by name.
    """

    def __init__(self, servers: Mapping[str, Server], options: ServerOptions) -> None:
        self._servers = servers
        self._allow_urls = options.allow_mcp_urls
        self.max_rounds = options.mcp_max_rounds
        limits = McpLimits(options.mcp_timeout, options.mcp_max_result_size, options.mcp_max_connections)
        self.connections = McpConnections(limits)

    @classmethod
    def of(cls, options: ServerOptions) -> McpServers | None:
        """The MCP servers of the options; None if requests may use none. Raises ``PenstockError`` (``invalid``) if the
        configuration is wrong, or the package ``mcp`` is not installed."""
        if options.allow_mcp_urls:
            check_installed("allow_mcp_urls")
        servers = load_mcp_config(options.mcp_config) if options.mcp_config else {}
        return cls(servers, options) if servers or options.allow_mcp_urls else None

    @property
    def built_in(self) -> Collection[str]:
        """Types of OpenAI's built-in tools that an MCP server of the configuration replaces."""
        return [kind for kind, name in BUILT_IN.items() if name in self._servers]

    def requested(self, tools: list[Tool]) -> list[RequestedServer]:
        """Return the MCP servers of a request's tools.

        Raises ``PenstockError``: ``invalid`` for wrong or contradictory fields, ``unsupported`` for a server that is
        not configured.
        """
        found: dict[str, RequestedServer] = {}
        for i, tool in enumerate(tools):
            if (requested := self._requested(tool, f"tools[{i}]")) is None:
                continue
            if requested.label in found:
                raise invalid(f"{requested.path}.server_label", f"{requested.label!r} is used twice: use unique labels")
            found[requested.label] = requested
        return list(found.values())

    def _requested(self, tool: Tool, path: str) -> RequestedServer | None:
        if tool.type in self.built_in:
            name = BUILT_IN[tool.type]
            return RequestedServer(name, self._servers[name], path, ToolFilter(), ApprovalFilter(never=ToolFilter()))
        if tool.type != "mcp":
            return None
        if tool.connector_id is not None:
            message = f"{path}.connector_id: connectors are OpenAI's; use server_label or server_url"
            raise PenstockError(Code.UNSUPPORTED, message, f"{path}.connector_id")
        label = require(tool.server_label, f"{path}.server_label")
        if not LABEL.fullmatch(label):
            message = "must be 1 to 64 letters, digits, dots, hyphens and underscores"
            raise invalid(f"{path}.server_label", f"{message}, is {label!r:.80}")
        allowed, approval = tool.allowed_tools, tool.require_approval
        if isinstance(approval, str) or approval is None:
            approval = ApprovalFilter(never=ToolFilter() if approval == "never" else None)
        if not isinstance(allowed, ToolFilter):
            allowed = ToolFilter(tool_names=allowed)
        return RequestedServer(label, self._server(tool, label, path), path, allowed, approval)

    def _server(self, tool: Tool, label: str, path: str) -> Server:
        """The server that a tool names, with the tool's headers."""
        server = self._find(tool, label, path)
        headers = dict(tool.headers or {})
        if tool.authorization is not None:
            headers["Authorization"] = f"Bearer {tool.authorization}"
        if not headers:
            return server
        if isinstance(server, StdioServer):
            raise invalid(
                f"{path}.headers", f"the MCP server {label!r} is a process and has no headers; leave them out"
            )
        configured = {name.lower() for name in server.headers}
        for name, value in headers.items():
            _check_header(f"{path}.headers", name, value)
            if name.lower() in configured:
                raise invalid(f"{path}.headers", f"{name!r:.50} is set by the server's configuration; leave it out")
        return msgspec.structs.replace(server, headers={**server.headers, **headers})

    def _find(self, tool: Tool, label: str, path: str) -> Server:
        url = tool.server_url
        if url is None:
            if (named := self._servers.get(label)) is not None:
                return named
            known = ", ".join(self._servers) or "none"
            message = f"the MCP server {label!r} is not configured (--mcp-config); configured: {known}"
            raise PenstockError(Code.UNSUPPORTED, f"{path}.server_label: {message}", f"{path}.server_label")
        for server in self._servers.values():
            if isinstance(server, HttpServer) and server.url == url:
                return server
        check_url(f"{path}.server_url", url)
        if not self._allow_urls:
            message = "only URLs of configured MCP servers are allowed (--mcp-config, --allow-mcp-urls)"
            raise PenstockError(Code.UNSUPPORTED, f"{path}.server_url: {message}", f"{path}.server_url")
        return HttpServer(url, public_only=True)


def _matches(tools: ToolFilter, tool: McpTool) -> bool:
    if tools.tool_names is not None and tool.name not in tools.tool_names:
        return False
    return tools.read_only is None or tools.read_only == tool.is_read_only


def _check_header(path: str, name: str, value: str) -> None:
    """Raise ``PenstockError`` (``invalid``) for a header that cannot be sent."""
    if not name or not all(c.isascii() and (c.isalnum() or c in "!#$%&'*+-.^_`|~") for c in name):
        raise invalid(path, f"{name!r:.50} is not the name of a header")
    if name.lower() in FORBIDDEN_HEADERS:
        raise invalid(path, f"{name} cannot be set; leave it out")
    if not (value.isascii() and value.isprintable()):
        raise invalid(path, f"the value of {name} must consist of printable ASCII characters")
