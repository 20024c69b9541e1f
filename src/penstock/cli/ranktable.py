"""``penstock ranktable``: write or merge rank tables of separate prefill and decode instances."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.cluster import ranktable
from penstock.cluster.ranktable import Local, Server
from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal

GEN_FLAGS = ("api_server", "prefill_server_list", "decode_server_list", "ip")
MERGE_FLAGS = ("global_ranktable_list",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "gen: write this machine's tables; merge: merge the global tables of several machines"
    parser.add_argument("--mode", choices=("gen", "merge"), required=True, help=about)
    parser.add_argument("--save-dir", type=Path, default=Path(), metavar="FOLDER", help="output folder (default: .)")
    gen = parser.add_argument_group("with --mode gen")
    gen.add_argument("--api-server", action="store_true", help="this machine runs the router; exactly one machine does")
    for role in ("prefill", "decode"):
        about = f"devices of each {role} instance on this machine, such as 0,1 2,3 for two instances"
        gen.add_argument(f"--{role}-server-list", nargs="+", default=[], metavar="DEVICES", help=about)
    gen.add_argument("--ip", default="", help="address of this machine (default: of its outgoing interface)")
    merge = parser.add_argument_group("with --mode merge")
    about = "global table of each machine"
    merge.add_argument("--global-ranktable-list", nargs="+", type=Path, default=[], metavar="FILE", help=about)


def run(args: argparse.Namespace) -> int:
    gen = args.mode == "gen"
    if other := [name for name in (MERGE_FLAGS if gen else GEN_FLAGS) if getattr(args, name)]:
        raise invalid(other[0], f"requires --mode {'merge' if gen else 'gen'}")
    _write(args.save_dir, _gen(args) if gen else _merge(args))
    return 0


def _gen(args: argparse.Namespace) -> dict[str, msgspec.Struct]:
    """Create this machine's tables, by file name. Raises ``PenstockError`` (``invalid``) for invalid devices."""
    ip = args.ip or _address()
    entries = [("prefill_server_list", entry) for entry in args.prefill_server_list]
    entries += [("decode_server_list", entry) for entry in args.decode_server_list]
    if not entries and not args.api_server:
        raise invalid("mode", "gen needs --prefill-server-list, --decode-server-list or --api-server")
    seen: set[str] = set()
    result: dict[str, msgspec.Struct] = {}
    roles: dict[str, list[Server]] = {"prefill_server_list": [], "decode_server_list": []}
    for role, entry in entries:
        devices = entry.split(",")
        if wrong := next((device for device in devices if read_decimal(device, ranktable.MAX_DEVICE) is None), None):
            message = f"{entry!r} is not a comma-separated list of device numbers: {wrong!r} must be from 0 to"
            raise invalid(role, f"{message} {ranktable.MAX_DEVICE}")
        if both := next((device for i, device in enumerate(devices) if device in [*seen, *devices[:i]]), None):
            raise invalid(role, f"device {both} is given twice: list each device once")
        seen.update(devices)
        name = f"local_ranktable_{ip}_{''.join(devices)}.json"
        if name in result:
            message = f"{entry!r} would be written to {name}, like another instance; change the order of its devices"
            raise invalid(role, message)
        server = ranktable.instance(ip, devices)
        roles[role].append(server)
        result[name] = Local(server_list=(server,))
    schedulers = [ranktable.scheduler(ip)] if args.api_server else []
    if schedulers:
        result[f"local_ranktable_{ip}_host.json"] = Local(server_list=(schedulers[0],))
    return {f"global_ranktable_{ip}.json": ranktable.combine([schedulers, *roles.values()]), **result}


def _merge(args: argparse.Namespace) -> dict[str, msgspec.Struct]:
    if not args.global_ranktable_list:
        raise invalid("global_ranktable_list", "is missing: set it to the files that --mode merge merges")
    tables = [ranktable.read(path) for path in args.global_ranktable_list]
    return {"global_ranktable_merge.json": ranktable.merge(tables)}


def _write(folder: Path, tables: Mapping[str, msgspec.Struct]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            text = msgspec.json.format(msgspec.json.encode(table), indent=4)
            (folder / name).write_bytes(text + b"\n")
            print(folder / name)
    except OSError as error:
        raise invalid("save_dir", f"cannot write to {folder}: {error.strerror}; set another folder") from error


def _address() -> str:
    """Address of the outgoing interface, found without sending a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
