"""Messages between nodes, encoded as MessagePack. Messages between executor and workers are in ``messages``."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config.options import EngineOptions

NODE_READY = "ready: node"
"""Start of the line that a node logs once its ranks have loaded the model."""


class Join(msgspec.Struct, tag=True, frozen=True):
    """A node's first message to node 0."""

    node_rank: int
    options: EngineOptions
    model: dict[str, str]
    """Digests of the node's checkpoint (``model_digests``). Files with weights of other stages may be absent."""
    host_name: str
    port: int
    """TCP port for connections from nodes with higher ranks, at the address from which this node connects."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Sent by node 0: the node may not join. Sent by another node: it cannot start its ranks."""

    reason: str
    retry: bool = False
    """True if the node may try to join again later."""


class StartRanks(msgspec.Struct, tag=True, frozen=True):
    """All nodes have joined: connect the ranks to those of other nodes, and start them."""

    session: bytes
    """Random id of this start of the engine, repeated in ``LinkRanks``."""
    options: EngineOptions
    addresses: list[tuple[str, int]]
    """Host and port of each node, by node rank. The entry of node 0 is a placeholder: all nodes know its address."""


class LinkRanks(msgspec.Struct, tag=True, frozen=True):
    """First message on a connection between two nodes; the two ranks that it names use the connection afterwards."""

    session: bytes
    lower: int
    """World rank of the connected rank on the listening node."""
    higher: int
    """World rank of the connected rank on the connecting node."""


class RanksStarted(msgspec.Struct, tag=True, frozen=True):
    """The reply to ``StartRanks``: the processes of the node's ranks are running."""

    pids: list[int]
    """Process ids of the node's ranks."""


class RankEnded(msgspec.Struct, tag=True, frozen=True):
    """The process of a rank has ended. The last message on the connection."""

    rank: int
    reason: str
    lost_link: bool
    """True if it ended because it lost its connection to a rank on another node (``LINK_LOST``)."""


class GetProgress(msgspec.Struct, tag=True, frozen=True):
    """Request a node's ``RankProgress``."""


class RankProgress(msgspec.Struct, tag=True, frozen=True):
    """The reply to ``GetProgress``: how far the node's ranks have computed their current steps."""

    progress: list[tuple[int, int, int]]
    """Progress of each rank of the node (``penstock.parallel.shared_memory.RankProgress``)."""


Message = Join | Refused | StartRanks | LinkRanks | RanksStarted | RankEnded | GetProgress | RankProgress
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def decode(message: bytes) -> Message:
    """Decode a message. Raises ``msgspec.MsgspecError`` for invalid messages, for example from another version."""
    decoded: Message = _decoder.decode(message)
    return decoded
