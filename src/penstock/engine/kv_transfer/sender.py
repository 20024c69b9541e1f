"""The prefill engine's end of a connection: a state machine without I/O.

```
            Start                  all slots offered            Stop, lease over, connection lost
  (unknown) ─────► computing ─────────────────────► finished ──────────────────────────────────► (unknown)
                       │  engine failed                                                             ▲
                       └────────────────► failed ───────────────────────────────────────────────────┘
```

A slot of the buffer belongs to one transfer from ``offer`` on. It is released once D has verified it
(``Status.released``) or the transfer has ended, and none of its pieces is being sent (``sent``).
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
"""Seconds after which an unacknowledged message is sent again."""


class Exported(msgspec.Struct, frozen=True):
    """A slot of the buffer that holds an exported slot of a transfer."""

    index: int
    """Slot of the transfer."""
    slot: int
    """Slot of the buffer, allocated by the caller. The transfer takes ownership of it."""
    epoch: int
    """Epoch of the buffer slot."""


class Cancelled(NamedTuple):
    """The engine no longer has to compute a transfer."""

    transfer: bytes


class Sending(NamedTuple):
    """A piece to send. Call ``Sender.sent`` afterwards."""

    message: Data
    slot: int
    """Slot of the buffer."""


class _Transfer:
    """State of a transfer."""

    def __init__(self, start: Start, hashes: list[bytes], now: float) -> None:
        self.start = start
        self.hashes = hashes
        self.last_heard = now
        self.offers: list[tuple[Offer, float]] = []
        """Offers, each with the time at which it was last sent."""
        self.slots: dict[int, tuple[int, int]] = {}
        """Buffer slot and epoch of each slot of the transfer that D may read."""
        self.end: Finished | Failed | None = None
        """Last message; None until it is sent."""
        self.end_sent = 0.0
        """Time at which ``end`` was last sent."""


class Sender:
    """Transfers to one decode engine.

    Methods append messages to ``outgoing``, pieces to ``sending``, and ``events`` for the engine. The caller handles
    and clears these lists. ``now`` arguments are times on the monotonic clock.

    Args:
        buffer: buffer from which pieces are sent.
        weights_version: version of this engine's weights.
        lease: seconds without a message from D after which a transfer is dropped.
    """

    def __init__(self, buffer: TransferBuffer, weights_version: str, lease: float) -> None:
        self._buffer = buffer
        self._weights_version = weights_version
        self._lease = lease
        self._transfers: dict[bytes, _Transfer] = {}
        self._last_heard = 0.0
        """Time of the last message from D."""
        self._busy: dict[int, int] = {}
        """Number of pieces being sent, by slot of the buffer."""
        self._to_release: set[int] = set()
        """Slots of the buffer to release once none of their pieces is being sent."""
        self.outgoing: list[ToDecode] = []
        """Messages to send."""
        self.sending: list[Sending] = []
        """Pieces to send."""
        self.events: list[Start | Cancelled] = []
        """Events for the engine."""

    def has(self, transfer: bytes) -> bool:
        """True if the transfer has not ended."""
        return transfer in self._transfers

    def receive(self, message: ToPrefill, now: float) -> None:
        """Handle a message from D."""
        self._last_heard = now
        state = self._transfers.get(message.transfer)
        if state is not None:
            state.last_heard = now
        match message:
            case Start():
                if state is None:
                    hashes = slot_hashes(
                        self._weights_version,
                        message.adapter_version,
                        message.cache_salt,
                        message.tokens,
                        self._buffer.state_slots,
                        self._buffer.has_tokens,
                    )
                    self._transfers[message.transfer] = _Transfer(message, hashes, now)
                    self.events.append(message)
                self.outgoing.append(Accepted(message.transfer))
            case Stop():
                self._drop(message.transfer)
                self.outgoing.append(Stopped(message.transfer))
            case Status() | Read() if state is None:
                self.outgoing.append(Stopped(message.transfer))
            case Status():
                assert state is not None
                first = state.start.first_slot
                for index in [index for index in state.slots if index < first + message.released]:
                    self._free(state.slots.pop(index)[0])
                if not self._resend(state, message.offers, now):
                    self.outgoing.append(Accepted(message.transfer))
            case Read():
                assert state is not None
                self._read(state, message)

    def offer(self, transfer: bytes, exported: list[Exported], first_layer: int, last_layer: int, now: float) -> None:
        """Offer layers ``first_layer`` to ``last_layer`` (exclusive) of the exported slots. The offer of layer 0 passes
        ownership of the slots to the transfer; if it has ended, the slots are released."""
        state = self._transfers.get(transfer)
        if state is None or isinstance(state.end, Failed):
            for each in exported if first_layer == 0 else ():
                self._free(each.slot)
            return
        pieces = []
        for each in exported:
            index, slot, epoch = each.index, each.slot, each.epoch
            state.slots[index] = slot, epoch
            checksum = new_checksum(state.hashes[index], epoch, first_layer, last_layer)
            checksum.update(self._buffer.layers(slot, first_layer, last_layer))
            pieces.append(Piece(index, slot, epoch, checksum.intdigest()))
        offer = Offer(transfer, len(state.offers), first_layer, last_layer, pieces)
        state.offers.append((offer, now))
        self.outgoing.append(offer)

    def finish(self, transfer: bytes, num_cached: int, now: float) -> None:
        """End a transfer after all its slots were offered."""
        if state := self._transfers.get(transfer):
            state.end, state.end_sent = Finished(transfer, len(state.offers), num_cached), now
            self.outgoing.append(state.end)

    def fail(self, transfer: bytes, failure: Failure, now: float) -> None:
        """End a transfer that the engine cannot compute."""
        if state := self._transfers.get(transfer):
            state.end, state.end_sent = Failed(transfer, failure), now
            self.outgoing.append(state.end)

    def sent(self, sending: Sending) -> None:
        """Record that a piece of ``sending`` was sent, or cannot be sent because the connection was lost."""
        self._busy[sending.slot] -= 1
        if not self._busy[sending.slot]:
            del self._busy[sending.slot]
            if sending.slot in self._to_release:
                self._to_release.remove(sending.slot)
                self._buffer.release(sending.slot)

    def expire(self, now: float) -> bool:
        """Drop transfers with an expired lease. Returns False if the connection must be closed, to release slots of
        ended transfers: their pieces are still being sent, but D sends no messages."""
        for transfer in [key for key, state in self._transfers.items() if now - state.last_heard > self._lease]:
            self._drop(transfer)
        return not (self._to_release and now - self._last_heard > self._lease)

    def close(self) -> None:
        """Drop all transfers after the connection is lost."""
        for transfer in list(self._transfers):
            self._drop(transfer)

    def _read(self, state: _Transfer, message: Read) -> None:
        """Send a requested piece, or ``Gone`` if the buffer no longer has it."""
        known = state.slots.get(message.index) == (message.slot, message.epoch)
        valid = 0 <= message.first_layer < message.last_layer <= self._buffer.num_layers
        if not (known and valid and self._buffer.holds(message.slot, message.epoch)):
            self.outgoing.append(Gone(message.transfer, message.index, message.first_layer, message.last_layer))
            return
        self._busy[message.slot] = self._busy.get(message.slot, 0) + 1
        layers = message.first_layer, message.last_layer
        size = len(self._buffer.layers(message.slot, *layers))
        self.sending.append(Sending(Data(message.transfer, message.index, message.epoch, *layers, size), message.slot))

    def _resend(self, state: _Transfer, offers: int, now: float) -> bool:
        """Resend the offers from number ``offers`` on, and the end, unless they were sent recently. Returns True if any
        message was sent."""
        late = [i for i in range(offers, len(state.offers)) if now - state.offers[i][1] > RESEND_INTERVAL]
        for i in late:
            offer, _ = state.offers[i]
            current = [piece for piece in offer.pieces if state.slots.get(piece.index) == (piece.slot, piece.epoch)]
            state.offers[i] = offer, now
            self.outgoing.append(msgspec.structs.replace(offer, pieces=current))
        if state.end and now - state.end_sent > RESEND_INTERVAL:
            state.end_sent = now
            self.outgoing.append(state.end)
            return True
        return bool(late)

    def _drop(self, transfer: bytes) -> None:
        """Remove a transfer and free its slots; ignored if the transfer is unknown."""
        state = self._transfers.pop(transfer, None)
        if state is None:
            return
        for slot, _ in state.slots.values():
            self._free(slot)
        if state.end is None:
            self.events.append(Cancelled(transfer))

    def _free(self, slot: int) -> None:
        """Release a slot of the buffer once none of its pieces is being sent."""
        if slot in self._busy:
            self._to_release.add(slot)
        else:
            self._buffer.release(slot)
