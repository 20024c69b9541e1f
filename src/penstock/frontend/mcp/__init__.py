"""Client of MCP servers (Model Context Protocol): configuration file, connections, tools and calls.

The package ``mcp`` (extra ``mcp``) is imported by ``McpConnections``.
"""

from .config import HttpServer, McpConfig, Server, StdioServer, check_installed, load_mcp_config
from .connection import McpConnection, McpConnections, McpError, McpLimits, McpTool
