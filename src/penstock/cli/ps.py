"""``penstock ps``: running servers, with the host memory (RAM) in which all their processes are resident."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.serve.process.server_record import ServerRecord

from .processes import age, parents, resident_bytes, tree
from .running_servers import listed_servers
from .screen import print_json
from .table import table

COLUMNS = ("MODEL", "ADDRESS", "PID", "STATE", "UPTIME", "DEVICE", "MEMORY")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "print as JSON: memory in bytes, uptime in seconds"
    parser.add_argument("--json", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    servers = [_fields(server) for server in listed_servers()]
    if args.json:
        print_json(servers)
        return 0
    if not servers:
        print("no running servers; penstock serve starts one")
        return 0
    print(*table(COLUMNS, [_row(server) for server in servers]), sep="\n")
    return 0


def _fields(server: ServerRecord) -> dict[str, Any]:
    return {
        "models": server.models,
        "url": server.url,
        "grpc_address": server.grpc_address,
        "pid": server.pid,
        "state": server.state,
        "uptime": round(age(server.start_time), 1),
        "role": server.role,
        "device": server.device,
        "memory": resident_bytes(tree(server.pid, parents())),
    }


def _row(server: dict[str, Any]) -> tuple[str, ...]:
    state = server["state"]
    models = [
        name if its_state == state or state == "draining" else f"{name} ({its_state})"
        for name, its_state in server["models"].items()
    ]
    return (
        ", ".join(models) or "-",
        server["url"] or server["grpc_address"] or "-",
        str(server["pid"]),
        state if server["role"] == "mixed" else f"{state} ({server['role']})",
        duration(server["uptime"]),
        server["device"],
        f"{server['memory'] / 2**30:.2f} GiB",
    )


def duration(seconds: float) -> str:
    """Duration with its two largest units: ``3d 4h``, ``2m 5s``, ``7s``."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h}h"
    if hours:
        return f"{h}h {m}m"
    return f"{m}m {s}s" if minutes else f"{s}s"
