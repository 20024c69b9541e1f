"""The messages between nodes, encoded as MessagePack, besides those that they pass on between executor and workers."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config.options import EngineOptions

NODE_READY = "ready: node"
"""Begins the line in a node's log once its ranks have loaded the model."""


class Join(msgspec.Struct, tag=True, frozen=True):
    """The first message of a node to node 0."""

    node_rank: int
    options: EngineOptions
    model: dict[str, str]
    """Identifies the contents of each file of its checkpoint, which may lack weights of other nodes' stages."""
    host_name: str
    port: int
    """TCP port on which it accepts connections of nodes with higher numbers, at the address that it connects from."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The answer to a node that cannot take part, or of one that cannot start its ranks."""

    reason: str
    retry: bool = False
    """Whether it may take part later."""


class StartRanks(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``Join`` once all nodes have joined: connect to the others, and start the ranks."""

    session: bytes
    """Identifies this start among others."""
    options: EngineOptions
    addresses: list[tuple[str, int]]
    """Of all nodes; the first one's is a placeholder, as each node knows it."""


class LinkRanks(msgspec.Struct, tag=True, frozen=True):
    """The only message on a connection between two ranks before it is theirs."""

    session: bytes
    lower: int
    """World rank on the node that was connected to."""
    higher: int


class RanksStarted(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``StartRanks``, with the ranks' process ids."""

    pids: list[int]


class RankEnded(msgspec.Struct, tag=True, frozen=True):
    """A rank's process has ended, and the connection ends with this message."""

    rank: int
    reason: str
    lost_link: bool
    """Whether the cause is elsewhere."""


class GetPlaces(msgspec.Struct, tag=True, frozen=True):
    """Asks a node how far its ranks have come."""


class Places(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``GetPlaces``, for each rank of the node (``penstock.parallel.shared_memory.rank_progress``)."""

    places: list[tuple[int, int, int]]


Message = Join | Refused | StartRanks | LinkRanks | RanksStarted | RankEnded | GetPlaces | Places
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def decode(message: bytes) -> Message:
    """Raises ``msgspec.MsgspecError``, as for a message of another version."""
    decoded: Message = _decoder.decode(message)
    return decoded
