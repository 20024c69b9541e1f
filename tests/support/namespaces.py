"""Network namespaces that act as machines with one address each, connected by a switch."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Self

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@cache
def unavailable_reason() -> str:
    """Reason why network namespaces cannot be created on this machine; empty if they can be created."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return "ip and tc (iproute2) are not installed"
    try:
        with Namespaces(2):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", b"") or b""
        return f"network namespaces cannot be created here: {output.decode().strip() or error}"


class Namespaces:
    """Context manager of network namespaces. At its end they are removed; processes in them then have no network.

    Args:
        count: number of machines. Their addresses are 10.0.0.1, 10.0.0.2 and so on; one switch connects them.
    """

    def __init__(self, count: int) -> None:
        number = next(_numbers)
        self._switch = f"penstock-{os.getpid()}-{number}-switch"
        self._names = [f"penstock-{os.getpid()}-{number}-{node}" for node in range(count)]
        self.addresses = [f"10.0.0.{node + 1}" for node in range(count)]
        self.names = dict(zip(self.addresses, self._names, strict=True))
        """Names of the namespaces by address."""

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for node, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
                _ip("netns", "add", name)
                port = ["type", "veth", "peer", "name", f"port{node}", "netns", self._switch]
                _ip("link", "add", "net", "netns", name, *port)
                _ip("-n", self._switch, "link", "set", f"port{node}", "master", "switch", "up")
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "net")
                _ip("-n", name, "link", "set", "net", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self._names, self._switch):
            with suppress(subprocess.CalledProcessError, OSError):
                _ip("netns", "delete", name)

    @contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """Context in which this thread opens sockets and starts processes on a machine."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        other = os.open(f"/run/netns/{self._names[node]}", os.O_RDONLY)
        try:
            _enter(other)
            yield
        finally:
            _enter(before)
            os.close(other)
            os.close(before)

    def connect(self, node: int, connected: bool) -> None:
        """Connect a machine to the switch, or disconnect it."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "up" if connected else "down")

    def separate(self, one: int, other: int, separated: bool = True) -> None:
        """Drop all packets between two machines, or stop dropping them."""
        for here, there in ((one, other), (other, one)):
            action = "add" if separated else "delete"
            _ip("-n", self._names[here], "route", action, "blackhole", f"{self.addresses[there]}/32")

    def slow_down(self, node: int, rate: str) -> None:
        """Limit the rate at which a machine sends, such as ``10mbit``."""
        limit = ["tc", "-n", self._names[node], "qdisc", "replace", "dev", "net", "root", "tbf"]
        subprocess.run([*limit, "rate", rate, "burst", "16kb", "latency", "50ms"], check=True, capture_output=True)

    def speed_up(self, node: int) -> None:
        subprocess.run(["tc", "-n", self._names[node], "qdisc", "delete", "dev", "net", "root"], check=True)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
