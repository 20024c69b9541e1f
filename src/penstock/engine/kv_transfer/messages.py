"""The protocol of KV transfers: messages between a decode engine (D) and a prefill engine (P), as MessagePack.

A *transfer* is the prompt of one request. Its tokens are numbered in *slots* of ``SLOT_TOKENS``, whatever the block
sizes of the engines. D repeats what is not answered, and both ignore what they know already, or do not know any more,
so messages may be lost, come late, twice or in another order.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from penstock.checkpoint.kv_spec import CANONICAL_LAYOUT
from penstock.core import Failure
from penstock.version import __version__

from ..kv.block_hash import extend_block_hashes, root_hash
from .buffer import SLOT_TOKENS
from .nixl import NixlAddress
from .shared_memory import BufferAddress


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """What two engines compare when they meet."""

    version: str = __version__
    layout_version: int = CANONICAL_LAYOUT
    weights_version: str
    fingerprint: str
    """``ModelInfo.fingerprint``: equal for engines whose results are equal to the bit."""
    layers: list[tuple[int, int, str]]
    """Of each layer: heads of keys and values, bytes of a vector, and the type of its numbers."""


# --- From D to P -----------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message. Answered with ``Welcome`` or ``Refused``."""

    instance: Instance
    allow_fingerprint_mismatch: bool = False


class Start(msgspec.Struct, tag=True, frozen=True):
    """Compute a prompt. Repeated until something of the transfer is heard of."""

    transfer: bytes
    """Identifies this attempt; 16 random bytes."""
    request_id: str
    """The request's id in D's log."""
    tokens: list[int]
    first_slot: int
    """Slots before this one are in D's cache already, and are not sent."""
    adapter: str
    """``EngineRequest.adapter``; empty for the base model."""
    adapter_version: str
    """Identifies the contents of the adapter; empty for the base model."""
    cache_salt: str
    priority: int
    timeout: float
    """Seconds after which D does not wait any more; 0 is any."""
    trace: dict[str, str] = {}
    """As of ``EngineRequest``: of the span of the transfer."""


class Read(msgspec.Struct, tag=True, frozen=True):
    """Send a piece. Answered with ``Data`` or ``Gone``."""

    transfer: bytes
    index: int
    """Slot of the transfer."""
    slot: int
    """Slot of P's buffer."""
    epoch: int
    first_layer: int
    last_layer: int


class Status(msgspec.Struct, tag=True, frozen=True):
    """How far D is. Sent whenever that changes, and as a heartbeat while the transfer lasts."""

    transfer: bytes
    offers: int
    """Number of leading offers that have come; those after them are sent again."""
    released: int
    """Number of leading slots that D has read and verified, counted from ``first_slot``; P may reuse them."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The transfer has ended, well or not; D reads nothing of it any more. Answered with ``Stopped``; repeated until
    then."""

    transfer: bytes


# --- From P to D -----------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``Hello``."""

    instance: Instance
    memory: BufferAddress | None = None
    """P's transfer buffer, for engines of the same host."""
    nixl: NixlAddress | None = None
    """The same, for engines that read by NIXL."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``Hello`` of an instance that does not fit. The connection ends."""

    reason: str


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``Start``, and to a ``Status`` that says nothing new."""

    transfer: bytes


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Layers of a slot that have been computed."""

    index: int
    """Slot of the transfer."""
    slot: int
    """Slot of P's buffer that holds it."""
    epoch: int
    """Counts the uses of that slot: the piece is there while the slot has this epoch."""
    checksum: int
    """``new_checksum`` of the piece."""


class Offer(msgspec.Struct, tag=True, frozen=True):
    """Pieces that D may read."""

    transfer: bytes
    number: int
    """Offers of a transfer are numbered from 0."""
    first_layer: int
    last_layer: int
    pieces: list[Piece]


class Finished(msgspec.Struct, tag=True, frozen=True):
    """All slots have been offered."""

    transfer: bytes
    offers: int
    """Number of offers."""
    num_cached: int
    """Leading tokens that were in P's prefix cache."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The prompt will not be computed."""

    transfer: bytes
    failure: Failure


class Data(msgspec.Struct, tag=True, frozen=True):
    """A piece, whose bytes follow this message."""

    transfer: bytes
    index: int
    epoch: int
    first_layer: int
    last_layer: int
    size: int
    """Number of bytes."""


class Gone(msgspec.Struct, tag=True, frozen=True):
    """The piece is not there any more."""

    transfer: bytes
    index: int
    first_layer: int
    last_layer: int


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """P does not know the transfer: it was stopped, or D has not been heard of for too long."""

    transfer: bytes


ToPrefill = Start | Read | Status | Stop
ToDecode = Accepted | Offer | Finished | Failed | Data | Gone | Stopped
Message = Hello | Welcome | Refused | ToPrefill | ToDecode

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Raises ``msgspec.MsgspecError``, as for a message of another version."""
    message: Message = _decoder.decode(data)
    return message


def slot_hashes(weights: str, adapter: str, salt: str, tokens: Sequence[int]) -> list[bytes]:
    """The hash of each slot of a transfer: of its tokens, all before them, and all else that keys and values depend on.
    The last slot may be partial.

    Args:
        weights: version of the weights.
        adapter: version of the adapter.
        salt: ``EngineRequest.cache_salt``.
    """
    root = root_hash(weights, adapter, salt)
    hashes: list[bytes] = []
    extend_block_hashes(hashes, root, tokens, SLOT_TOKENS)
    if rest := tokens[len(hashes) * SLOT_TOKENS :]:
        key = hashes[-1] if hashes else root
        hashes.append(hashlib.blake2b(array("I", rest).tobytes(), key=key, digest_size=len(key)).digest())
    return hashes


def new_checksum(slot_hash: bytes, epoch: int, first_layer: int, last_layer: int) -> xxh3_64:
    """XXH3 of a piece, which is to be updated with its bytes. It is seeded with what the piece is, so that keys and
    values of another slot, layer or time are not taken for it.

    Args:
        slot_hash: of ``slot_hashes``.
    """
    what = slot_hash + b"".join(number.to_bytes(8, "little") for number in (epoch, first_layer, last_layer))
    return xxh3_64(seed=xxh3_64_intdigest(what))
