"""Servers of this user on this machine, for commands that need one of them."""

from __future__ import annotations

from penstock.serve.process.server_record import ServerRecord, running_servers

from .processes import ancestors, parents

DEFAULT_URL = "http://127.0.0.1:8000"


def listed_servers() -> list[ServerRecord]:
    """Running servers. Those of a ``penstock pd`` deployment count as one."""
    servers, known_parents = running_servers(), parents()
    pids = {server.pid for server in servers}
    return [server for server in servers if not pids & ancestors(server.pid, known_parents)]


def only_url(answering: bool = False) -> str:
    """URL of the only running server; empty without a server, or with several servers.

    Args:
        answering: empty also if the server does not answer requests of clients: it starts, stops, or is an instance of
            prefill or decode.
    """
    servers = [server for server in listed_servers() if server.url]
    if len(servers) != 1:
        return ""
    (server,) = servers
    answers = server.state in ("ready", "sleeping") and server.role not in ("prefill", "decode")
    return server.url if answers or not answering else ""


def default_url() -> str:
    """``only_url``, or ``DEFAULT_URL`` if it is empty."""
    return only_url() or DEFAULT_URL


def describe(server: ServerRecord) -> str:
    """Models, address and process id of a server, for messages."""
    address = server.url or server.grpc_address
    return f"{', '.join(server.models) or 'no model'}{address and f' at {address}'} (process {server.pid})"
