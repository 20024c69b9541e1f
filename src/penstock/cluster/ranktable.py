"""Rank tables: the instances and devices of a deployment with separate prefill and decode instances.

The JSON format is Ascend's (docs/dialects/vllm.md). A global table lists all instances; a local table lists only the
instance of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.errors import invalid

GROUPS = {"0": "scheduler", "1": "prefill", "2": "decode"}
"""Role by group id of a global table."""
MAX_DEVICE = 10**6
"""Maximum ``device_id`` in a table."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    device_id: str
    """Index of the device on its machine."""
    device_ip: str
    rank_id: str
    """Rank of the device in its instance, from 0."""


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """An instance. The scheduler has no devices."""

    server_id: str
    server_ip: str
    device: tuple[Device, ...] | UnsetType = UNSET


class Group(msgspec.Struct, frozen=True, kw_only=True):
    group_id: str
    server_count: str
    server_list: tuple[Server, ...]


class Global(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal["1.0"] = "1.0"
    status: Literal["completed"] = "completed"
    server_group_list: tuple[Group, ...]
    """One group for each of ``GROUPS``, in this order. The scheduler group has one server, or none if the scheduler is
    in the table of another machine."""


class Local(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal["1.0"] = "1.0"
    status: Literal["completed"] = "completed"
    group_id: Literal["0"] = "0"
    server_count: Literal["1"] = "1"
    server_list: tuple[Server]


def instance(ip: str, device_ids: Sequence[str]) -> Server:
    """Instance on the machine with address ``ip``, which is also the address of its devices."""
    devices = [
        Device(device_id=device_id, device_ip=ip, rank_id=str(rank)) for rank, device_id in enumerate(device_ids)
    ]
    return Server(server_id=ip, server_ip=ip, device=tuple(devices))


def scheduler(ip: str) -> Server:
    return Server(server_id=ip, server_ip=ip)


def combine(groups: Iterable[Iterable[Server]]) -> Global:
    """Create a table from the lists of schedulers, prefill and decode instances."""
    lists = [tuple(group) for group in groups]
    return Global(
        server_group_list=tuple(
            Group(group_id=number, server_count=str(len(result)), server_list=result)
            for number, result in zip(GROUPS, lists, strict=True)
        )
    )


def read(path: Path, option: str = "global_ranktable_list") -> Global:
    """Read a global table. Raises ``PenstockError`` (``invalid``), naming ``option``, if the table is unreadable or
    inconsistent."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Global)
    except (OSError, ValueError) as error:
        raise invalid(option, f"{path} cannot be read as a global rank table: {error}") from error
    if wrong := _contradiction(result):
        raise invalid(option, f"{path}: {wrong}")
    return result


def read_local(path: Path, option: str) -> Server:
    """Read the instance of a local table. Arguments and errors as for ``read``."""
    try:
        (server,) = msgspec.json.decode(path.read_bytes(), type=Local).server_list
    except (OSError, ValueError) as error:
        raise invalid(option, f"{path} cannot be read as a local rank table: {error}") from error
    return server


def device_in_two_instances(servers: Iterable[Server]) -> tuple[str, str] | None:
    """Server address and id of the first device that is listed twice; None: no device is listed twice."""
    seen = set()
    for server in servers:
        for device in server.device or ():
            if (place := (server.server_ip, device.device_id)) in seen:
                return place
            seen.add(place)
    return None


def merge(tables: Sequence[Global]) -> Global:
    """Merge the tables of several machines.

    Raises ``PenstockError`` (``invalid``) unless exactly one table has the scheduler, and each device is in one
    instance.
    """
    lists = [[server for table in tables for server in table.server_group_list[i].server_list] for i in range(3)]
    if len(lists[0]) != 1:
        message = f"have {len(lists[0])} API servers instead of one: use --api-server on exactly one machine"
        raise invalid("global_ranktable_list", message)
    if shared := device_in_two_instances([*lists[1], *lists[2]]):
        message = f"device {shared[1]} of {shared[0]} is in two instances: remove it from one"
        raise invalid("global_ranktable_list", message)
    return combine(lists)


def _contradiction(table: Global) -> str:
    """Describe an inconsistency of a table; empty if it is consistent."""
    groups = table.server_group_list
    if [group.group_id for group in groups] != list(GROUPS):
        return f"server_group_list must be the groups {', '.join(GROUPS)}"
    for group in groups:
        if group.server_count != str(count := len(group.server_list)):
            return f"server_count of group {group.group_id} is {group.server_count}, but it has {count} servers"
        for server in group.server_list:
            ranks = [device.rank_id for device in server.device or ()]
            if bool(ranks) == (group.group_id == "0"):
                return f"{GROUPS[group.group_id]} instances must {'not ' if ranks else ''}have devices"
            if ranks != [str(rank) for rank in range(len(ranks))]:
                return f"rank_id must count from 0 in each instance, is {', '.join(ranks)}"
    return ""
