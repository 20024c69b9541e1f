"""Parsing of network addresses, and checks whether they belong to this machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal

ANY_ADDRESS = ("", "0.0.0.0", "::")
"""Wildcard hosts, which mean all addresses of a machine."""


def split_address(text: str, option: str) -> tuple[str, int]:
    """Split ``host:port``, or ``[address]:port`` for IPv6. Raises ``PenstockError`` (``invalid``), which names
    ``option``, for other texts."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    number = read_decimal(port, 65535)
    if not colon or number is None or (":" in bare) != (bare != host):
        raise invalid(option, f"{text!r} is not an address: write host:port, or [address]:port for IPv6")
    return bare, number


def join_address(host: str, port: int | str) -> str:
    """Join host and port; the inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(address: str, host: str) -> str:
    """Replace the host of an address reported by another machine by ``host`` if it is a wildcard (0.0.0.0, ::)."""
    own, port = split_address(address, "address")
    return join_address(host if own in ANY_ADDRESS else own, port)


def own_index(addresses: Sequence[str]) -> int | None:
    """Index of the first address that belongs to this machine; None if none does."""
    return next((index for index, address in enumerate(addresses) if _is_own(address)), None)


def _is_own(address: str) -> bool:
    with contextlib.suppress(OSError):
        family, kind, _, _, name = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as bound:
            bound.bind(name)
            return True
    return False
