"""Configuration file of MCP servers: the JSON format that other MCP clients use."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path

import httpx2
import msgspec

from penstock.config import secrets
from penstock.core.errors import invalid
from penstock.core.json_files import read_json_file

FIELD = "mcp_config"
"""Name of the option, for errors."""
LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Allowed names of MCP servers: they are part of the tool names in the prompt."""
MIN_VERSION = 2
"""Minimum major version of the package ``mcp``."""
HTTP_TYPES = ("http", "streamable-http", "streamable_http", "streamableHttp")
"""Names of the streamable HTTP transport in the configuration files of clients."""


class StdioServer(msgspec.Struct, frozen=True):
    """MCP server that is started as a process, and answers on its standard output."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    """Environment variables in addition to PATH, HOME and a few others; the rest is not inherited."""
    cwd: str | None = None


class HttpServer(msgspec.Struct, frozen=True):
    """MCP server with the streamable HTTP transport."""

    url: str
    headers: Mapping[str, str] = {}
    public_only: bool = False
    """Connect only to public addresses: the URL comes from a client."""


Server = StdioServer | HttpServer
McpConfig = Mapping[str, Server]
"""MCP servers by name."""


class _Entry(msgspec.Struct):
    """Entry of a configuration file. Further fields, which belong to other clients, are ignored."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    type: str | None = None
    disabled: bool = False


class _File(msgspec.Struct):
    servers: dict[str, _Entry] = msgspec.field(name="mcpServers")


def load_mcp_config(path: str) -> dict[str, Server]:
    """Load a configuration file: ``{"mcpServers": {NAME: {"command": ..., "args": [...], "env": {...}} | {"url": ...,
    "headers": {...}}}}``. Entries with ``"disabled": true`` are left out.

    Raises ``PenstockError`` (``invalid``) if the file is malformed, or the package ``mcp`` is not installed.
    """
    check_installed()
    given = read_json_file(Path(path).expanduser(), FIELD)
    try:
        file = msgspec.convert(given, _File)
    except msgspec.ValidationError as error:
        example = '{"mcpServers": {"files": {"command": "mcp-files", "args": ["/data"]}}}'
        raise invalid(FIELD, f"{path} must be a JSON object such as {example}: {error}") from error
    secrets.register(file)
    return {name: _server(name, entry) for name, entry in file.servers.items() if not entry.disabled}


def check_installed(field: str = FIELD) -> None:
    """Raise ``PenstockError`` (``invalid``) unless the package ``mcp`` is installed in a supported version.

    Args:
        field: name of the option that needs it, for errors.
    """
    try:
        version = importlib.metadata.version("mcp")
    except importlib.metadata.PackageNotFoundError as error:
        message = "needs the package mcp, which is not installed: pip install 'penstock-llm[mcp]'"
        raise invalid(field, message) from error
    if int(version.partition(".")[0]) < MIN_VERSION:
        message = f"needs the package mcp {MIN_VERSION} or later, not {version}: pip install -U 'penstock-llm[mcp]'"
        raise invalid(field, message)


def check_url(field: str, url: str) -> None:
    """Raise ``PenstockError`` (``invalid``) unless a text is an HTTP URL with a host."""
    try:
        parsed = httpx2.URL(url)
        valid = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (httpx2.InvalidURL, UnicodeError, ValueError):
        valid = False
    if not valid:
        raise invalid(field, f"must be a URL such as https://example.com/mcp, is {url!r:.120}")


def _server(name: str, entry: _Entry) -> Server:
    field = f"{FIELD}.{name}"
    if not LABEL.fullmatch(name):
        message = "must be a name of 1 to 64 letters, digits, dots, hyphens and underscores"
        raise invalid(field[:80], message)
    if (entry.command is None) == (entry.url is None):
        raise invalid(field, "must have either command or url")
    if entry.command is not None:
        return StdioServer(entry.command, entry.args, entry.env, entry.cwd and os.path.expanduser(entry.cwd))
    assert entry.url is not None
    if entry.type not in (None, *HTTP_TYPES):
        raise invalid(f"{field}.type", f"{entry.type!r:.50} is not supported; use http (streamable HTTP)")
    check_url(f"{field}.url", entry.url)
    return HttpServer(entry.url, entry.headers)
