"""Which of several machines this one is."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence


def own_index(addresses: Sequence[str]) -> int | None:
    """Index of the first address that is one of this machine's; None where none is."""
    return next((index for index, address in enumerate(addresses) if _is_own(address)), None)


def _is_own(address: str) -> bool:
    with contextlib.suppress(OSError):
        family, kind, _, _, name = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as bound:
            bound.bind(name)
            return True
    return False
