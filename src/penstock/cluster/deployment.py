"""Configuration of an instance or a router from the rank tables of its deployment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.config.addresses import join_address
from penstock.config.options import Configuration
from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal

from . import ranktable
from .ranktable import Global, Server

GLOBAL, LOCAL, PORTS = "global_rank_table", "rank_table", "node_ports"


def with_rank_tables(configuration: Configuration) -> Configuration:
    """Set role, instances and cores according to the rank tables; without rank tables, return ``configuration``.

    Raises ``PenstockError`` (``invalid``) if the tables contradict each other, the ports, or other options.
    """
    server = configuration.server
    if not server.global_rank_table and not server.rank_table:
        if server.node_ports:
            raise invalid(
                PORTS,
                "requires global_rank_table and rank_table (environment variables GLOBAL_RANK_TABLE_FILE_PATH and "
                "RANK_TABLE_FILE_PATH)",
            )
        return configuration
    for name in (GLOBAL, LOCAL):
        if not getattr(server, name):
            other = LOCAL if name == GLOBAL else GLOBAL
            raise invalid(name, f"must be set, as {other} requires it")
    table = ranktable.read(Path(server.global_rank_table), GLOBAL)
    own = ranktable.read_local(Path(server.rank_table), LOCAL)
    scheduler, prefill, decode = (group.server_list for group in table.server_group_list)
    if shared := ranktable.device_in_two_instances([*prefill, *decode]):
        raise invalid(GLOBAL, f"device {shared[1]} of {shared[0]} is in two instances: remove it from one")
    if not own.device:
        if own not in scheduler:
            raise invalid(LOCAL, f"has {_describe(own)}, but {GLOBAL} has {_list(scheduler)}: they must be the same")
        return _router(configuration, own, prefill, decode)
    if own not in (*prefill, *decode):
        raise invalid(LOCAL, f"{_describe(own)} is not in {GLOBAL}, which lists {_list([*prefill, *decode])}")
    return _instance(configuration, table, own, "prefill" if own in prefill else "decode")


def _router(
    configuration: Configuration, own: Server, prefill: Sequence[Server], decode: Sequence[Server]
) -> Configuration:
    server = configuration.server
    instances = [*prefill, *decode]
    if not prefill or not decode:
        raise invalid(GLOBAL, f"has no {'decode' if prefill else 'prefill'} instance: add at least one")
    if len(server.node_ports) != len(instances):
        message = f"has {len(server.node_ports)} ports for {len(instances)} instances: {_list(instances)}"
        raise invalid(PORTS, f"{message}; set the --port of each, in this order")
    urls: list[str] = []
    for instance, port in zip(instances, server.node_ports, strict=True):
        if not read_decimal(port, 65535):
            raise invalid(PORTS, f"{port!r} is not a port (1 to 65535)")
        url = f"http://{join_address(instance.server_ip, int(port))}"
        if url in urls:
            raise invalid(PORTS, f"has the port {port} for two instances on {instance.server_ip}: use different ports")
        urls.append(url)
    if f"http://{join_address(own.server_ip, server.port)}" in urls:
        message = f"is {server.port}, which {PORTS} assigns to an instance on this machine: use another port"
        raise invalid("port", message, server.port)
    split = len(prefill)
    instances_by_role = {"prefill_instances": tuple(urls[:split]), "decode_instances": tuple(urls[split:])}
    server = msgspec.structs.replace(server, **instances_by_role)
    return msgspec.structs.replace(configuration.with_engine(role="router"), server=server)


def _instance(configuration: Configuration, table: Global, own: Server, role: str) -> Configuration:
    engine = configuration.engine
    devices = [device.device_id for device in own.device or ()]
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if ranks != len(devices):
        message = f"{ranks} ranks need as many devices, but {LOCAL} has {len(devices)} ({', '.join(devices)})"
        raise invalid("tensor_parallel_size", message, len(devices))
    if engine.cpu_binding == "auto":
        here = [
            device.device_id
            for group in table.server_group_list
            for server in group.server_list
            if server.server_ip == own.server_ip
            for device in server.device or ()
        ]
        configuration = configuration.with_engine(cpu_binding=bind_devices(devices, here))
    return configuration.with_engine(role=role)


def bind_devices(devices: Sequence[str], here: Sequence[str]) -> str:
    """Value of ``cpu_binding`` for the devices of an instance. Each device gets some of the process's allowed cores.

    Cores are divided evenly among all devices of the machine, ordered by id. If there are fewer cores than devices,
    devices share cores.

    Args:
        devices: ids of the instance's devices.
        here: ids of all devices of this machine, in all instances.

    Raises ``PenstockError`` (``invalid``) for an id that is not a number.
    """
    if wrong := next((device for device in here if read_decimal(device, ranktable.MAX_DEVICE) is None), None):
        raise invalid(GLOBAL, f"the device_id {wrong!r} is not a number from 0 to {ranktable.MAX_DEVICE}")
    order = sorted(set(here), key=int)
    cores = sorted(os.sched_getaffinity(0))
    shares = []
    for device in devices:
        place = order.index(device)
        first, end = (len(cores) * number // len(order) for number in (place, place + 1))
        shares.append(",".join(map(str, cores[first : max(end, first + 1)])))
    return "|".join(shares)


def _describe(server: Server) -> str:
    """Description of an instance for error messages."""
    if not server.device:
        return f"the scheduler at {server.server_ip}"
    return f"{server.server_ip} with the devices {','.join(device.device_id for device in server.device)}"


def _list(servers: Sequence[Server]) -> str:
    return "; ".join(map(_describe, servers)) or "none"
