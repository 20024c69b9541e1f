"""The decode engine's end of a connection: a state machine without I/O.

```
  start ──► asking ──first answer──► pulling ──all pieces verified──► stopping ──Stopped──► (forgotten)
               │                        │  Failed, unknown to P,          ▲
               │                        │  no answer, wrong pieces        │
               └────────────────────────┴─────────────────────────────────┘
```
"""

from __future__ import annotations

import os
from collections import deque
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64

from penstock.core import Code, Failure

from .buffer import TransferBuffer
from .messages import (
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
)

RESEND_INTERVAL = 0.25
"""Seconds after which something that was not answered is sent again."""
HEARTBEAT_INTERVAL = 0.5
"""Seconds between two ``Status`` messages."""
MAX_READS = 4
"""Number of times that a piece is read before its transfer has failed."""
MAX_STOPS = 20
"""Number of times that ``Stop`` is sent."""


class Pull(msgspec.Struct, kw_only=True):
    """A transfer to be pulled."""

    start: Start
    hashes: list[bytes]
    """``slot_hashes`` of its tokens."""

    @property
    def num_slots(self) -> int:
        return len(self.hashes) - self.start.first_slot


class Arrived(msgspec.Struct, frozen=True):
    """A verified piece in a slot of D's buffer, which ``Receiver.imported`` gives back."""

    transfer: bytes
    index: int
    slot: int
    first_layer: int
    last_layer: int
    size: int
    """Bytes."""


class Completed(NamedTuple):
    """All pieces of a transfer have arrived."""

    transfer: bytes
    num_cached: int


class Broken(NamedTuple):
    """A transfer has failed."""

    transfer: bytes
    failure: Failure


class Job(NamedTuple):
    """A piece to be read into D's buffer. ``Receiver.begin`` has to be called before anything is written, then
    ``verify`` or ``unreadable``; otherwise it is asked for again."""

    transfer: bytes
    piece: Piece
    first_layer: int
    last_layer: int
    slot: int
    """Slot of D's buffer."""

    @property
    def message(self) -> Read:
        return Read(
            self.transfer, self.piece.index, self.piece.slot, self.piece.epoch, self.first_layer, self.last_layer
        )


Key = tuple[int, int, int]
"""Slot of a transfer, first and last layer of a piece."""


class _Wanted:
    """A piece that was offered and has not arrived."""

    __slots__ = ("asked", "begun", "piece", "reads")

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.reads = 0
        self.begun = False
        """Whether it is being read."""
        self.asked: float | None = None
        """When it was last asked for; None while it is to be."""


class _Transfer:
    def __init__(self, pull: Pull, now: float) -> None:
        self.start, self.hashes = pull.start, pull.hashes
        self.asked = self.heard = self.reported = now
        self.answered = False
        self.offers: set[int] = set()
        self.end: Finished | None = None
        self.wanted: dict[Key, _Wanted] = {}
        self.layers: dict[int, int] = {index: 0 for index in range(pull.start.first_slot, len(pull.hashes))}
        """Slot of the transfer → number of its layers that were verified."""
        self.arrived: set[Key] = set()
        self.slots: dict[int, int] = {}
        """Slot of the transfer → slot of D's buffer."""
        self.users: dict[int, int] = {}
        """Slot of the transfer → pieces of it that are being read into D's buffer, or imported from it."""

    @property
    def num_offers(self) -> int:
        """Number of leading offers that have come."""
        return next(i for i in range(len(self.offers) + 1) if i not in self.offers)


class Receiver:
    """Transfers from one prefill engine.

    Args:
        buffer: that pieces are read into.
        timeout: seconds without an answer after which a transfer has failed.
        peer: name of the prefill engine, for messages.

    ``outgoing``, ``jobs`` and ``events`` fill up with what is to be done; the caller empties them.
    """

    def __init__(self, buffer: TransferBuffer, timeout: float, peer: str = "the prefill instance") -> None:
        self._buffer = buffer
        self._num_layers = buffer.num_layers
        self._timeout = timeout
        self._peer = peer
        self._transfers: dict[bytes, _Transfer] = {}
        self._stopping: dict[bytes, tuple[int, float]] = {}
        """Transfer → number of ``Stop`` messages sent, and when the last was."""
        self._orphans: dict[bytes, _Transfer] = {}
        """Transfers that have ended, pieces of which are being read or imported: their slots are not free."""
        self._queue: deque[tuple[bytes, Key]] = deque()
        """Pieces to be asked for."""
        self._heard = self._read = self._answered = 0.0
        """When something came last, when a piece did, and when the newest of the pieces that came was asked for."""
        self.outgoing: list[ToPrefill] = []
        self.jobs: list[Job] = []
        self.events: list[Arrived | Completed | Broken] = []
        self.num_rereads = self.num_checksum_failures = 0

    def has(self, transfer: bytes) -> bool:
        """Whether a transfer has not ended, or pieces of it are still being imported."""
        return transfer in self._transfers or transfer in self._orphans

    def start(self, pull: Pull, now: float) -> None:
        """Begin a transfer."""
        self._transfers[pull.start.transfer] = _Transfer(pull, now)
        self.outgoing.append(pull.start)

    def stop(self, transfer: bytes, now: float) -> None:
        """End a transfer; does nothing where it has ended."""
        if transfer in self._transfers:
            self._end(transfer, now)

    def receive(self, message: ToDecode, now: float) -> None:
        """Handle a message other than ``Data``."""
        self._heard = now
        one = self._transfers.get(message.transfer)
        if isinstance(message, Stopped):
            self._stopping.pop(message.transfer, None)
            if one is not None and one.answered:
                self._break(message.transfer, f"{self._peer} does not know the transfer any more", now)
            return
        if one is None:
            if not isinstance(message, Gone) and message.transfer not in self._stopping:
                self.outgoing.append(Stop(message.transfer))  # as after a Start that came late
            return
        one.heard, one.answered = now, True
        match message:
            case Offer():
                self._take_offer(one, message)
            case Finished():
                one.end = message
            case Failed(transfer, failure):
                self.events.append(Broken(transfer, failure))
                self._end(transfer, now)
                return
            case Gone(_, index, first, last):
                if (index, first, last) in one.wanted:
                    self._break(message.transfer, f"{self._peer} has freed keys and values too early", now)
                    return
        self._advance(message.transfer, one, now)

    def begin(self, job: Job) -> bool:
        """Whether a piece is still wanted, and may be written to D's buffer from now on."""
        one = self._transfers.get(job.transfer)
        wanted = one.wanted.get((job.piece.index, job.first_layer, job.last_layer)) if one else None
        if one is None or wanted is None or wanted.piece.epoch != job.piece.epoch or wanted.begun:
            return False
        wanted.begun = True
        one.users[job.piece.index] = one.users.get(job.piece.index, 0) + 1
        return True

    def job_of(self, data: Data) -> Job | None:
        """The piece whose bytes follow ``data``; None where it is not wanted (any more)."""
        one = self._transfers.get(data.transfer)
        key = data.index, data.first_layer, data.last_layer
        wanted = one.wanted.get(key) if one else None
        if one is None or wanted is None or data.index not in one.slots or data.epoch != wanted.piece.epoch:
            return None
        job = Job(data.transfer, wanted.piece, data.first_layer, data.last_layer, one.slots[data.index])
        return job if data.size == len(self.bytes_of(job)) else None

    def is_wanted(self, job: Job) -> bool:
        """Whether the transfer of a piece goes on."""
        return job.transfer in self._transfers

    def bytes_of(self, job: Job) -> memoryview:
        """The memory of a piece in D's buffer."""
        return self._buffer.layers(job.slot, job.first_layer, job.last_layer)

    def new_checksum(self, job: Job) -> xxh3_64:
        """The checksum of a piece that ``begin`` has begun, to be updated with its bytes as they are read."""
        piece, one = job.piece, self._transfers[job.transfer]
        return new_checksum(one.hashes[piece.index], piece.epoch, job.first_layer, job.last_layer)

    def verify(self, job: Job, checksum: int, now: float) -> None:
        """A piece was read into D's buffer, where it has this checksum. One with a wrong checksum is read again."""
        self._heard = self._read = now
        one = self._transfers.get(job.transfer)
        if one is None:
            self._leave(job.transfer, job.piece.index)
            return
        one.heard = now
        piece, key = job.piece, (job.piece.index, job.first_layer, job.last_layer)
        self._answered = max(self._answered, one.wanted[key].asked or 0.0)
        if checksum != piece.checksum:
            self.num_checksum_failures += 1
            self._leave(job.transfer, piece.index)
            self._ask_again(job.transfer, one, key, "has sent wrong keys and values", now)
            return
        del one.wanted[key]
        one.arrived.add(key)
        one.layers[piece.index] += job.last_layer - job.first_layer
        size = len(self.bytes_of(job))
        self.events.append(Arrived(job.transfer, piece.index, job.slot, job.first_layer, job.last_layer, size))
        if one.layers[piece.index] == self._num_layers:
            self._report(job.transfer, one, now)
        self._advance(job.transfer, one, now)

    def unreadable(self, job: Job, now: float) -> None:
        """A piece could not be read where its offer says."""
        self._leave(job.transfer, job.piece.index)
        if job.transfer in self._transfers:
            self._break(job.transfer, f"{self._peer} has freed keys and values too early", now)

    def imported(self, arrived: Arrived, now: float) -> None:
        """The engine has imported a piece, or dropped it."""
        self._leave(arrived.transfer, arrived.index)
        self._ask(now)

    def _leave(self, transfer: bytes, index: int) -> None:
        """One user less of a slot, which is released with the last one where all of it has arrived, or its transfer has
        ended."""
        orphan = self._orphans.get(transfer)
        one = orphan or self._transfers[transfer]
        one.users[index] -= 1
        if one.users[index]:
            return
        del one.users[index]
        if orphan or one.layers[index] == self._num_layers:
            self._buffer.release(one.slots.pop(index))
        if orphan and not one.slots:
            del self._orphans[transfer]

    def tick(self, now: float) -> bool:
        """Repeat what was not answered, and give up what is not answered at all. Returns False where nothing is
        answered: the connection is of no use."""
        answers = True
        for transfer, one in list(self._transfers.items()):
            if now - max(one.heard, self._heard) > self._timeout:
                answers = False
                self._break(transfer, f"{self._peer} has not answered for {self._timeout:g} seconds", now)
                continue
            if not one.answered and now - one.asked > RESEND_INTERVAL:
                one.asked = now
                self.outgoing.append(one.start)
            elif one.answered and now - one.reported > HEARTBEAT_INTERVAL:
                self._report(transfer, one, now)
            for key, wanted in list(one.wanted.items()):  # of a connection that lost the answer
                if self._is_late(wanted, now):
                    self._ask_again(transfer, one, key, "does not send keys and values", now)
                    if transfer not in self._transfers:
                        break
        for transfer, (count, sent) in list(self._stopping.items()):
            if count >= MAX_STOPS:
                del self._stopping[transfer]
            elif now - sent > RESEND_INTERVAL:
                self._stopping[transfer] = count + 1, now
                self.outgoing.append(Stop(transfer))
        self._ask(now)
        return answers

    def _is_late(self, wanted: _Wanted, now: float) -> bool:
        """Whether the answer to a ``Read`` is lost. Answers come in the order of the questions, however slowly."""
        limit = self._timeout / MAX_READS
        if wanted.begun or wanted.asked is None or now - wanted.asked <= limit:
            return False
        return wanted.asked < self._answered or now - self._read > limit

    def close(self, reason: str, now: float) -> None:
        """The connection is lost: all transfers have failed. The next one may be used with the same object."""
        for transfer in list(self._transfers):
            self._break(transfer, reason, now)
        self._stopping.clear()
        self.outgoing.clear()

    def _take_offer(self, one: _Transfer, offer: Offer) -> None:
        if offer.number in one.offers:
            return
        valid = 0 <= offer.first_layer < offer.last_layer <= self._num_layers
        if not valid or any(piece.index not in one.layers for piece in offer.pieces):
            return
        one.offers.add(offer.number)
        for piece in offer.pieces:
            key = piece.index, offer.first_layer, offer.last_layer
            if key not in one.wanted and key not in one.arrived:
                one.wanted[key] = _Wanted(piece)
                self._queue.append((offer.transfer, key))

    def _advance(self, transfer: bytes, one: _Transfer, now: float) -> None:
        """Ask for pieces, and complete the transfer where none is left."""
        self._ask(now)
        if one.end and one.num_offers >= one.end.offers and not one.wanted and transfer in self._transfers:
            if any(layers != self._num_layers for layers in one.layers.values()):
                self._break(transfer, f"{self._peer} has not offered all keys and values", now)
                return
            self.events.append(Completed(transfer, one.end.num_cached))
            self._end(transfer, now)

    def _ask(self, now: float) -> None:
        """Ask for pieces while D's buffer has room. Those of slots that are there already overtake others, as these
        slots become free only with them."""
        left: deque[tuple[bytes, Key]] = deque()
        for transfer, key in self._queue:
            one = self._transfers.get(transfer)
            wanted = one.wanted.get(key) if one else None
            if one is None or wanted is None or wanted.asked is not None:
                continue
            index, first, last = key
            if index not in one.slots:
                if left or (allocated := self._buffer.allocate()) is None:
                    left.append((transfer, key))
                    continue
                one.slots[index] = allocated[0]
            wanted.asked, wanted.reads = now, wanted.reads + 1
            self.jobs.append(Job(transfer, wanted.piece, first, last, one.slots[index]))
        self._queue = left

    def _ask_again(self, transfer: bytes, one: _Transfer, key: Key, problem: str, now: float) -> None:
        wanted = one.wanted[key]
        if wanted.reads >= MAX_READS:
            self._break(transfer, f"{self._peer} {problem}, {MAX_READS} times", now)
            return
        self.num_rereads += 1
        wanted.asked, wanted.begun = None, False
        self._queue.append((transfer, key))
        self._ask(now)

    def _report(self, transfer: bytes, one: _Transfer, now: float) -> None:
        one.reported = now
        counts = list(one.layers.values())
        released = next((i for i, layers in enumerate(counts) if layers != self._num_layers), len(counts))
        self.outgoing.append(Status(transfer, one.num_offers, released))

    def _break(self, transfer: bytes, words: str, now: float) -> None:
        self.events.append(Broken(transfer, Failure(Code.UNAVAILABLE, words)))
        self._end(transfer, now)

    def _end(self, transfer: bytes, now: float) -> None:
        """Forget a transfer, and tell P. Slots of D's buffer are released once the engine does not read them."""
        one = self._transfers.pop(transfer)
        for index in [index for index in one.slots if index not in one.users]:
            self._buffer.release(one.slots.pop(index))
        if one.slots:
            self._orphans[transfer] = one
        self._stopping[transfer] = 1, now
        self.outgoing.append(Stop(transfer))


def new_transfer_id() -> bytes:
    """An identifier for ``Start``."""
    return os.urandom(16)
