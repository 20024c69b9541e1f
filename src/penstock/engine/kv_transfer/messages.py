"""The protocol of KV transfers: messages between a decode engine (D) and a prefill engine (P), as MessagePack.

A *transfer* is the prompt of one request. Its tokens are divided into *slots* of ``SLOT_TOKENS``, independent of the
engines' block sizes. Messages may be lost, delayed, duplicated or reordered: D repeats unanswered messages, and both
engines ignore duplicates and messages about unknown transfers.
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

from ..kv.block_hash import extend_block_hashes, root_hash, state_hashes
from .buffer import SLOT_TOKENS
from .nixl import NixlAddress
from .shared_memory import BufferAddress


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine, which must equal those of its peer."""

    version: str = __version__
    """Version of Penstock."""
    layout_version: int = CANONICAL_LAYOUT
    """Version of the layout of keys and values in the buffer."""
    weights_version: str
    """``ModelInfo.weights_version``."""
    fingerprint: str
    """``ModelInfo.fingerprint``: equal for engines with bit-identical results."""
    layers: list[tuple[int, int, str]]
    """Number of KV heads, bytes of a vector and its number format, for each layer."""
    states: tuple[int, list[int], int] | None = None
    """Number of tensor-parallel ranks, end of the layers of each pipeline stage, and largest number of bytes of a
    sequence's recurrent states on a rank; None without such states. Ranks exchange their states as they are, so
    instances need equal numbers."""


# --- From D to P -----------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message. P replies with ``Welcome`` or ``Refused``."""

    instance: Instance
    allow_fingerprint_mismatch: bool = False
    """D accepts keys and values of an engine with another fingerprint."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Request to compute a prompt. D repeats it until P answers with any message of the transfer."""

    transfer: bytes
    """Random id of this attempt, 16 bytes."""
    request_id: str
    """Id of the request in D's log."""
    tokens: list[int]
    """Token ids of the prompt, without the last one."""
    first_slot: int
    """First slot to transfer. D has all earlier slots in its prefix cache."""
    adapter: str
    """Name of the adapter; empty for the base model."""
    adapter_version: str
    """Version of the adapter's contents; empty for the base model."""
    cache_salt: str
    """``EngineRequest.cache_salt``."""
    priority: int
    """``EngineRequest.priority``."""
    timeout: float
    """Seconds until D's request times out; 0: never."""
    trace: dict[str, str] = {}
    """Trace context of the transfer's span, like ``EngineRequest.trace``."""


class Read(msgspec.Struct, tag=True, frozen=True):
    """Request to send a piece. P replies with ``Data`` or ``Gone``."""

    transfer: bytes
    index: int
    """Slot of the transfer."""
    slot: int
    """Slot of P's buffer."""
    epoch: int
    """``Piece.epoch``."""
    first_layer: int
    last_layer: int
    """Layer after the last one of the piece."""


class Status(msgspec.Struct, tag=True, frozen=True):
    """D's progress. D sends it on each change, and as a heartbeat during the transfer."""

    transfer: bytes
    offers: int
    """Number of leading offers received without a gap. P resends later offers."""
    released: int
    """Number of leading slots, from ``first_slot`` on, that D has read and verified. P may reuse these slots."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End of a transfer, completed or failed: D reads no more pieces. D repeats it until P replies with ``Stopped``."""

    transfer: bytes


# --- From P to D -----------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The reply to a ``Hello`` from a matching instance."""

    instance: Instance
    memory: BufferAddress | None = None
    """P's transfer buffer, for engines on the same host."""
    nixl: NixlAddress | None = None
    """P's transfer buffer, for engines that read with NIXL."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The reply to a ``Hello`` from an instance that does not match. P then closes the connection."""

    reason: str


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The reply to ``Start``, and to a ``Status`` that shows no missing offers."""

    transfer: bytes


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Computed layers of a slot: the unit of transfer."""

    index: int
    """Slot of the transfer."""
    slot: int
    """Slot of P's buffer."""
    epoch: int
    """Epoch of the buffer slot (``TransferBuffer``). The piece is valid while the slot has this epoch."""
    checksum: int
    """Checksum of the piece (``new_checksum``)."""


class Offer(msgspec.Struct, tag=True, frozen=True):
    """Pieces that D may read."""

    transfer: bytes
    number: int
    """Sequence number within the transfer, from 0."""
    first_layer: int
    last_layer: int
    """Layer after the last one of the pieces."""
    pieces: list[Piece]


class Finished(msgspec.Struct, tag=True, frozen=True):
    """End of the offers: P has offered all slots."""

    transfer: bytes
    offers: int
    """Total number of offers of the transfer."""
    num_cached: int
    """Number of leading tokens found in P's prefix cache."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Error of P, which does not compute the prompt."""

    transfer: bytes
    failure: Failure


class Data(msgspec.Struct, tag=True, frozen=True):
    """Header of a piece. The bytes of the piece follow this message."""

    transfer: bytes
    index: int
    epoch: int
    first_layer: int
    last_layer: int
    size: int
    """Size of the piece, bytes."""


class Gone(msgspec.Struct, tag=True, frozen=True):
    """The reply to a ``Read`` of a piece that is no longer in P's buffer."""

    transfer: bytes
    index: int
    first_layer: int
    last_layer: int


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """P does not know the transfer (any more): D has stopped it, or P has received no message from D for too long."""

    transfer: bytes


ToPrefill = Start | Read | Status | Stop
ToDecode = Accepted | Offer | Finished | Failed | Data | Gone | Stopped
Message = Hello | Welcome | Refused | ToPrefill | ToDecode

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decode a message. Raises ``msgspec.MsgspecError`` for an invalid message, such as one of another version."""
    message: Message = _decoder.decode(data)
    return message


def slot_hashes(
    weights: str, adapter: str, salt: str, tokens: Sequence[int], state_slots: int = 0, has_tokens: bool = True
) -> list[bytes]:
    """Hash of each slot of a transfer: of the slot's tokens, all tokens before the slot, and the other arguments. The
    last slot of tokens may be partial.

    Args:
        weights: version of the weights.
        adapter: version of the adapter.
        salt: ``EngineRequest.cache_salt``.
        state_slots, has_tokens: see ``TransferBuffer``.
    """
    root = root_hash(weights, adapter, salt)
    hashes: list[bytes] = []
    extend_block_hashes(hashes, root, tokens, SLOT_TOKENS)
    if rest := tokens[len(hashes) * SLOT_TOKENS :]:
        key = hashes[-1] if hashes else root
        hashes.append(hashlib.blake2b(array("I", rest).tobytes(), key=key, digest_size=len(key)).digest())
    return [*(hashes if has_tokens else ()), *state_hashes(hashes[-1] if hashes else root, state_slots)]


def new_checksum(slot_hash: bytes, epoch: int, first_layer: int, last_layer: int) -> xxh3_64:
    """XXH3 hasher for the bytes of a piece. Its seed identifies the piece, so that the data of another slot, epoch or
    layer gets a wrong checksum.

    Args:
        slot_hash: hash of the slot (``slot_hashes``).
    """
    identity = slot_hash + b"".join(number.to_bytes(8, "little") for number in (epoch, first_layer, last_layer))
    return xxh3_64(seed=xxh3_64_intdigest(identity))
