"""What an API process is told when it is started. Apart, so that the supervisor need not load what it serves with."""

from __future__ import annotations

import msgspec

from penstock.core.options import Configuration

WRONG = 2
"""Exit status of a worker that no other start would help."""


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    parent: int
    """The process without which this one must not be."""
    number: int
    configuration: Configuration
    """Its model is a folder."""
    names: tuple[str, ...]
    """Under which clients ask for the model."""
    engine: str
    """The engine's address."""
    sockets: tuple[int, ...]
    """File descriptors to accept connections on: the first for everything, unless HTTP is off, others for how the
    server is doing."""
    grpc_address: str = ""
    """Host and port for gRPC, which the supervisor keeps free; nothing for none."""
