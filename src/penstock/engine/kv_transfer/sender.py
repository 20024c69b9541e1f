"""The prefill engine's end of a connection: a state machine without I/O.

```
            Start                  all slots offered            Stop, lease over, connection lost
  (unknown) ─────► computing ─────────────────────► finished ──────────────────────────────────► (unknown)
                       │  engine failed                                                             ▲
                       └────────────────► failed ───────────────────────────────────────────────────┘
```

Each slot of the buffer belongs to one transfer from ``offer`` until D has verified it (``Status.released``) or the
transfer ends, but at least until nothing of it is being sent (``sent``).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock.core import Failure

from .buffer import TransferBuffer
from .messages import (
    Accepted,
    Data,
    Failed,
    Finished,
    Gone,
    Offer,
    Piece,
    Read,
    Start,
    Status,
    Stop,
    Stopped,
    ToDecode,
    ToPrefill,
    new_checksum,
    slot_hashes,
)

RESEND_INTERVAL = 0.2
"""Seconds after which something that was not heard of is sent again."""


class Exported(msgspec.Struct, frozen=True):
    """A slot of the buffer into which a slot of a transfer was exported."""

    index: int
    """Slot of the transfer."""
    slot: int
    """Slot of the buffer, allocated by the caller; the transfer's from now on."""
    epoch: int


class Cancelled(NamedTuple):
    """The engine need not compute a transfer any more."""

    transfer: bytes


class Sending(NamedTuple):
    """A piece to be sent; ``Sender.sent`` has to follow."""

    message: Data
    slot: int


class _Transfer:
    def __init__(self, start: Start, hashes: list[bytes], now: float) -> None:
        self.start = start
        self.hashes = hashes
        self.heard = now
        self.offers: list[tuple[Offer, float]] = []
        """Each offer with the time when it was last sent."""
        self.slots: dict[int, tuple[int, int]] = {}
        """Slot of the transfer → slot of the buffer and epoch, while D may read it."""
        self.end: Finished | Failed | None = None
        self.end_sent = 0.0


class Sender:
    """Transfers to one decode engine.

    Args:
        buffer: that pieces are read from.
        weights_version: of this engine.
        lease: seconds without a message after which a transfer is dropped.

    ``outgoing``, ``sending`` and ``events`` fill up with what is to be done; the caller empties them.
    """

    def __init__(self, buffer: TransferBuffer, weights_version: str, lease: float) -> None:
        self._buffer = buffer
        self._weights_version = weights_version
        self._lease = lease
        self._transfers: dict[bytes, _Transfer] = {}
        self._heard = 0.0
        """When the last message came."""
        self._busy: dict[int, int] = {}
        """Slot of the buffer → pieces of it that are being sent."""
        self._to_release: set[int] = set()
        """Slots of the buffer to release once nothing of them is being sent."""
        self.outgoing: list[ToDecode] = []
        self.sending: list[Sending] = []
        self.events: list[Start | Cancelled] = []

    def has(self, transfer: bytes) -> bool:
        """Whether a transfer has not ended."""
        return transfer in self._transfers

    def receive(self, message: ToPrefill, now: float) -> None:
        """Handle a message; ``now`` is the time on the monotonic clock."""
        self._heard = now
        one = self._transfers.get(message.transfer)
        if one is not None:
            one.heard = now
        match message:
            case Start():
                if one is None:
                    hashes = slot_hashes(
                        self._weights_version, message.adapter_version, message.cache_salt, message.tokens
                    )
                    self._transfers[message.transfer] = _Transfer(message, hashes, now)
                    self.events.append(message)
                self.outgoing.append(Accepted(message.transfer))
            case Stop():
                self._drop(message.transfer)
                self.outgoing.append(Stopped(message.transfer))
            case Status() | Read() if one is None:
                self.outgoing.append(Stopped(message.transfer))
            case Status():
                assert one is not None
                first = one.start.first_slot
                for index in [index for index in one.slots if index < first + message.released]:
                    self._free(one.slots.pop(index)[0])
                if not self._resend(one, message.offers, now):
                    self.outgoing.append(Accepted(message.transfer))
            case Read():
                assert one is not None
                self._read(one, message)

    def offer(self, transfer: bytes, exported: list[Exported], first_layer: int, last_layer: int, now: float) -> None:
        """Offer layers ``first_layer`` to ``last_layer`` of slots, which have been written. With the first layer the
        slots become the transfer's; those of a transfer that has ended are released."""
        one = self._transfers.get(transfer)
        if one is None or isinstance(one.end, Failed):
            for each in exported if first_layer == 0 else ():
                self._free(each.slot)
            return
        pieces = []
        for each in exported:
            index, slot, epoch = each.index, each.slot, each.epoch
            one.slots[index] = slot, epoch
            checksum = new_checksum(one.hashes[index], epoch, first_layer, last_layer)
            checksum.update(self._buffer.layers(slot, first_layer, last_layer))
            pieces.append(Piece(index, slot, epoch, checksum.intdigest()))
        offer = Offer(transfer, len(one.offers), first_layer, last_layer, pieces)
        one.offers.append((offer, now))
        self.outgoing.append(offer)

    def finish(self, transfer: bytes, num_cached: int, now: float) -> None:
        """All slots of a transfer have been offered."""
        if one := self._transfers.get(transfer):
            one.end, one.end_sent = Finished(transfer, len(one.offers), num_cached), now
            self.outgoing.append(one.end)

    def fail(self, transfer: bytes, failure: Failure, now: float) -> None:
        """The engine cannot compute a transfer."""
        if one := self._transfers.get(transfer):
            one.end, one.end_sent = Failed(transfer, failure), now
            self.outgoing.append(one.end)

    def sent(self, sending: Sending) -> None:
        """A piece of ``sending`` is not read any more: it was sent, or the connection is lost."""
        self._busy[sending.slot] -= 1
        if not self._busy[sending.slot]:
            del self._busy[sending.slot]
            if sending.slot in self._to_release:
                self._to_release.remove(sending.slot)
                self._buffer.release(sending.slot)

    def expire(self, now: float) -> bool:
        """Drop transfers whose lease is over. Returns False where D has gone silent while pieces of ended transfers are
        being sent to it: they are released only with the connection."""
        for transfer in [key for key, one in self._transfers.items() if now - one.heard > self._lease]:
            self._drop(transfer)
        return not (self._to_release and now - self._heard > self._lease)

    def close(self) -> None:
        """Drop all transfers, as the connection is lost."""
        for transfer in list(self._transfers):
            self._drop(transfer)

    def _read(self, one: _Transfer, message: Read) -> None:
        known = one.slots.get(message.index) == (message.slot, message.epoch)
        valid = 0 <= message.first_layer < message.last_layer <= self._buffer.num_layers
        if not (known and valid and self._buffer.holds(message.slot, message.epoch)):
            self.outgoing.append(Gone(message.transfer, message.index, message.first_layer, message.last_layer))
            return
        self._busy[message.slot] = self._busy.get(message.slot, 0) + 1
        layers = message.first_layer, message.last_layer
        size = len(self._buffer.layers(message.slot, *layers))
        self.sending.append(Sending(Data(message.transfer, message.index, message.epoch, *layers, size), message.slot))

    def _resend(self, one: _Transfer, offers: int, now: float) -> bool:
        """Send what D lacks again, unless it may be on its way. Returns whether anything was sent."""
        late = [i for i in range(offers, len(one.offers)) if now - one.offers[i][1] > RESEND_INTERVAL]
        for i in late:
            offer, _ = one.offers[i]
            current = [piece for piece in offer.pieces if one.slots.get(piece.index) == (piece.slot, piece.epoch)]
            one.offers[i] = offer, now
            self.outgoing.append(msgspec.structs.replace(offer, pieces=current))
        if one.end and now - one.end_sent > RESEND_INTERVAL:
            one.end_sent = now
            self.outgoing.append(one.end)
            return True
        return bool(late)

    def _drop(self, transfer: bytes) -> None:
        one = self._transfers.pop(transfer, None)
        if one is None:
            return
        for slot, _ in one.slots.values():
            self._free(slot)
        if one.end is None:
            self.events.append(Cancelled(transfer))

    def _free(self, slot: int) -> None:
        """Release a slot of the buffer, once nothing of it is being sent."""
        if slot in self._busy:
            self._to_release.add(slot)
        else:
            self._buffer.release(slot)
