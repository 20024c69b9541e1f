"""The decode engine's end of a connection: a state machine without I/O.

```
  start ─► starting ──first answer──► pulling ──all pieces verified──► stopping ──Stopped──► (unknown)
               │                         │  Failed, unknown to P,          ▲
               │                         │  no answer, wrong pieces        │
               └─────────────────────────┴─────────────────────────────────┘
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
"""Seconds after which an unanswered message is sent again."""
HEARTBEAT_INTERVAL = 0.5
"""Seconds between two ``Status`` messages without progress."""
MAX_READS = 4
"""Maximum number of reads of a piece before its transfer fails."""
MAX_STOPS = 20
"""Maximum number of times that ``Stop`` is sent."""
FREED = "has freed keys and values before they were read"
"""Predicate of an error message about the prefill engine."""


class Pull(msgspec.Struct, kw_only=True):
    """A transfer to pull."""

    start: Start
    hashes: list[bytes]
    """Hashes of the transfer's slots (``slot_hashes``)."""

    @property
    def num_slots(self) -> int:
        """Number of slots to transfer."""
        return len(self.hashes) - self.start.first_slot


class Arrived(msgspec.Struct, frozen=True):
    """A verified piece in D's buffer. ``Receiver.imported`` frees its memory."""

    transfer: bytes
    index: int
    """Slot of the transfer."""
    slot: int
    """Slot of D's buffer."""
    first_layer: int
    last_layer: int
    """Layer after the last one of the piece."""
    size: int
    """Size of the piece, bytes."""


class Completed(NamedTuple):
    """All pieces of a transfer have arrived."""

    transfer: bytes
    num_cached: int
    """Number of leading tokens found in P's prefix cache."""


class Broken(NamedTuple):
    """A transfer has failed."""

    transfer: bytes
    failure: Failure


class Job(NamedTuple):
    """A piece to read into D's buffer. Call ``Receiver.begin`` before writing to the buffer, and ``verify`` or
    ``unreadable`` afterwards. Without a timely ``begin``, the piece is requested again."""

    transfer: bytes
    piece: Piece
    first_layer: int
    last_layer: int
    slot: int
    """Slot of D's buffer."""

    @property
    def message(self) -> Read:
        """Message that requests the piece from P."""
        return Read(
            self.transfer, self.piece.index, self.piece.slot, self.piece.epoch, self.first_layer, self.last_layer
        )


Key = tuple[int, int, int]
"""Identifies a piece within a transfer: slot, first layer, last layer (exclusive)."""


class _Wanted:
    """A piece that is offered and has not arrived."""

    __slots__ = ("begun", "piece", "reads", "requested")

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.reads = 0
        """Number of requests so far."""
        self.begun = False
        """True while the piece is being read."""
        self.requested: float | None = None
        """Time of the last request; None if a request is queued."""


class _Transfer:
    """State of a transfer that has not ended."""

    def __init__(self, pull: Pull, now: float) -> None:
        self.start, self.hashes = pull.start, pull.hashes
        self.start_sent = self.last_heard = self.status_sent = now
        self.answered = False
        """True once P has answered ``Start``."""
        self.offers: set[int] = set()
        """Numbers of the received offers."""
        self.end: Finished | None = None
        """End of the offers; None until it is received."""
        self.wanted: dict[Key, _Wanted] = {}
        """Offered pieces that have not arrived."""
        self.layers: dict[int, int] = {index: 0 for index in range(pull.start.first_slot, len(pull.hashes))}
        """Number of verified layers of each slot of the transfer."""
        self.arrived: set[Key] = set()
        """Verified pieces."""
        self.slots: dict[int, int] = {}
        """Slot of D's buffer, by slot of the transfer."""
        self.users: dict[int, int] = {}
        """Number of pieces being read into D's buffer or imported from it, by slot of the transfer."""

    @property
    def num_offers(self) -> int:
        """Number of leading offers received without a gap."""
        return next(i for i in range(len(self.offers) + 1) if i not in self.offers)


class Receiver:
    """Transfers from one prefill engine.

    Methods append messages to ``outgoing``, pieces to read to ``jobs``, and ``events`` for the engine. The caller
    handles and clears these lists. ``now`` arguments are times on the monotonic clock.

    Args:
        buffer: buffer into which pieces are read.
        timeout: seconds without an answer after which a transfer fails.
        peer: name of the prefill engine in error messages.
    """

    def __init__(self, buffer: TransferBuffer, timeout: float, peer: str = "the prefill instance") -> None:
        self._buffer = buffer
        self._num_layers = buffer.num_layers
        self._timeout = timeout
        self._peer = peer
        self._transfers: dict[bytes, _Transfer] = {}
        self._stopping: dict[bytes, tuple[int, float]] = {}
        """For each transfer being stopped: number of ``Stop`` messages sent, and time of the last one."""
        self._orphans: dict[bytes, _Transfer] = {}
        """Ended transfers with slots that are not free yet: pieces are still being read or imported."""
        self._queue: deque[tuple[bytes, Key]] = deque()
        """Pieces to request."""
        self._last_heard = self._last_read = self._newest_answered = 0.0
        """Times of the last message from P, of the last piece, and of the newest request that P has answered."""
        self.outgoing: list[ToPrefill] = []
        """Messages to send."""
        self.jobs: list[Job] = []
        """Pieces to read."""
        self.events: list[Arrived | Completed | Broken] = []
        """Events for the engine."""
        self.num_rereads = self.num_checksum_failures = 0
        """Numbers for ``TransferStats`` since the caller has reset them."""

    def has(self, transfer: bytes) -> bool:
        """True if the transfer has not ended, or pieces of it are still being read or imported."""
        return transfer in self._transfers or transfer in self._orphans

    def start(self, pull: Pull, now: float) -> None:
        """Start a transfer."""
        self._transfers[pull.start.transfer] = _Transfer(pull, now)
        self.outgoing.append(pull.start)

    def stop(self, transfer: bytes, now: float) -> None:
        """End a transfer; ignored if it has already ended."""
        if transfer in self._transfers:
            self._end(transfer, now)

    def receive(self, message: ToDecode, now: float) -> None:
        """Handle a message from P other than ``Data``."""
        self._last_heard = now
        state = self._transfers.get(message.transfer)
        if isinstance(message, Stopped):
            self._stopping.pop(message.transfer, None)
            if state is not None and state.answered:
                self._fail(message.transfer, f"{self._peer} has dropped the transfer", now)
            return
        if state is None:
            if not isinstance(message, Gone) and message.transfer not in self._stopping:
                self.outgoing.append(Stop(message.transfer))  # P may have received ``Start`` late
            return
        state.last_heard, state.answered = now, True
        match message:
            case Offer():
                self._take_offer(state, message)
            case Finished():
                state.end = message
            case Failed(transfer, failure):
                self.events.append(Broken(transfer, failure))
                self._end(transfer, now)
                return
            case Gone(_, index, first, last):
                if (index, first, last) in state.wanted:
                    self._fail(message.transfer, f"{self._peer} {FREED}", now)
                    return
        self._advance(message.transfer, state, now)

    def begin(self, job: Job) -> bool:
        """Begin to read a piece into D's buffer. Returns False if the piece is no longer needed."""
        state = self._transfers.get(job.transfer)
        wanted = state.wanted.get((job.piece.index, job.first_layer, job.last_layer)) if state else None
        if state is None or wanted is None or wanted.piece.epoch != job.piece.epoch or wanted.begun:
            return False
        wanted.begun = True
        state.users[job.piece.index] = state.users.get(job.piece.index, 0) + 1
        return True

    def job_of(self, data: Data) -> Job | None:
        """Piece with the bytes that follow ``data``; None if the piece is not needed (any more)."""
        state = self._transfers.get(data.transfer)
        key = data.index, data.first_layer, data.last_layer
        wanted = state.wanted.get(key) if state else None
        if state is None or wanted is None or data.index not in state.slots or data.epoch != wanted.piece.epoch:
            return None
        job = Job(data.transfer, wanted.piece, data.first_layer, data.last_layer, state.slots[data.index])
        return job if data.size == len(self.bytes_of(job)) else None

    def is_wanted(self, job: Job) -> bool:
        """True if the piece's transfer has not ended."""
        return job.transfer in self._transfers

    def bytes_of(self, job: Job) -> memoryview:
        """Memory of a piece in D's buffer."""
        return self._buffer.layers(job.slot, job.first_layer, job.last_layer)

    def new_checksum(self, job: Job) -> xxh3_64:
        """Hasher for the bytes of a begun piece."""
        piece, state = job.piece, self._transfers[job.transfer]
        return new_checksum(state.hashes[piece.index], piece.epoch, job.first_layer, job.last_layer)

    def verify(self, job: Job, checksum: int, now: float) -> None:
        """Verify a piece that was read into D's buffer. A piece with a wrong ``checksum`` is requested again."""
        self._last_heard = self._last_read = now
        state = self._transfers.get(job.transfer)
        if state is None:
            self._release(job.transfer, job.piece.index)
            return
        state.last_heard = now
        piece, key = job.piece, (job.piece.index, job.first_layer, job.last_layer)
        self._newest_answered = max(self._newest_answered, state.wanted[key].requested or 0.0)
        if checksum != piece.checksum:
            self.num_checksum_failures += 1
            self._release(job.transfer, piece.index)
            self._request_again(job.transfer, state, key, "has sent keys and values with a wrong checksum", now)
            return
        del state.wanted[key]
        state.arrived.add(key)
        state.layers[piece.index] += job.last_layer - job.first_layer
        size = len(self.bytes_of(job))
        self.events.append(Arrived(job.transfer, piece.index, job.slot, job.first_layer, job.last_layer, size))
        if state.layers[piece.index] == self._num_layers:
            self._report(job.transfer, state, now)
        self._advance(job.transfer, state, now)

    def unreadable(self, job: Job, now: float) -> None:
        """Fail the transfer of a begun piece that could not be read from P's buffer."""
        self._release(job.transfer, job.piece.index)
        if job.transfer in self._transfers:
            self._fail(job.transfer, f"{self._peer} {FREED}", now)

    def imported(self, arrived: Arrived, now: float) -> None:
        """Free the memory of a piece that the engine has imported or dropped."""
        self._release(arrived.transfer, arrived.index)
        self._request(now)

    def _release(self, transfer: bytes, index: int) -> None:
        """Decrement the users of a slot. A slot without users is freed if it is complete or its transfer has ended."""
        orphan = self._orphans.get(transfer)
        state = orphan or self._transfers[transfer]
        state.users[index] -= 1
        if state.users[index]:
            return
        del state.users[index]
        if orphan or state.layers[index] == self._num_layers:
            self._buffer.release(state.slots.pop(index))
        if orphan and not state.slots:
            del self._orphans[transfer]

    def tick(self, now: float) -> bool:
        """Repeat unanswered messages, and fail transfers after the timeout. Returns False if P has not answered within
        the timeout; the connection should then be closed."""
        answers = True
        for transfer, state in list(self._transfers.items()):
            if now - max(state.last_heard, self._last_heard) > self._timeout:
                answers = False
                self._fail(transfer, f"{self._peer} has not answered for {self._timeout:g} seconds", now)
                continue
            if not state.answered and now - state.start_sent > RESEND_INTERVAL:
                state.start_sent = now
                self.outgoing.append(state.start)
            elif state.answered and now - state.status_sent > HEARTBEAT_INTERVAL:
                self._report(transfer, state, now)
            for key, wanted in list(state.wanted.items()):
                if self._is_late(wanted, now):
                    self._request_again(transfer, state, key, "has not sent keys and values", now)
                    if transfer not in self._transfers:
                        break
        for transfer, (count, sent) in list(self._stopping.items()):
            if count >= MAX_STOPS:
                del self._stopping[transfer]
            elif now - sent > RESEND_INTERVAL:
                self._stopping[transfer] = count + 1, now
                self.outgoing.append(Stop(transfer))
        self._request(now)
        return answers

    def _is_late(self, wanted: _Wanted, now: float) -> bool:
        """True if the answer to a ``Read`` is lost. P may be slow, but answers in the order of the requests."""
        limit = self._timeout / MAX_READS
        if wanted.begun or wanted.requested is None or now - wanted.requested <= limit:
            return False
        return wanted.requested < self._newest_answered or now - self._last_read > limit

    def close(self, reason: str, now: float) -> None:
        """Fail all transfers after the connection was lost. The receiver can be used with the next connection."""
        for transfer in list(self._transfers):
            self._fail(transfer, reason, now)
        self._stopping.clear()
        self.outgoing.clear()

    def _take_offer(self, state: _Transfer, offer: Offer) -> None:
        """Queue the offered pieces. Duplicate and invalid offers are ignored."""
        if offer.number in state.offers:
            return
        valid = 0 <= offer.first_layer < offer.last_layer <= self._num_layers
        if not valid or any(piece.index not in state.layers for piece in offer.pieces):
            return
        state.offers.add(offer.number)
        for piece in offer.pieces:
            key = piece.index, offer.first_layer, offer.last_layer
            if key not in state.wanted and key not in state.arrived:
                state.wanted[key] = _Wanted(piece)
                self._queue.append((offer.transfer, key))

    def _advance(self, transfer: bytes, state: _Transfer, now: float) -> None:
        """Request pieces, and complete the transfer if all have arrived."""
        self._request(now)
        if state.end and state.num_offers >= state.end.offers and not state.wanted and transfer in self._transfers:
            if any(layers != self._num_layers for layers in state.layers.values()):
                self._fail(transfer, f"{self._peer} has not offered all keys and values", now)
                return
            self.events.append(Completed(transfer, state.end.num_cached))
            self._end(transfer, now)

    def _request(self, now: float) -> None:
        """Request queued pieces while D's buffer has free slots. Pieces of allocated slots are requested first, since
        only they can complete and free these slots."""
        left: deque[tuple[bytes, Key]] = deque()
        for transfer, key in self._queue:
            state = self._transfers.get(transfer)
            wanted = state.wanted.get(key) if state else None
            if state is None or wanted is None or wanted.requested is not None:
                continue
            index, first, last = key
            if index not in state.slots:
                if left or (allocated := self._buffer.allocate()) is None:
                    left.append((transfer, key))
                    continue
                state.slots[index] = allocated[0]
            wanted.requested, wanted.reads = now, wanted.reads + 1
            self.jobs.append(Job(transfer, wanted.piece, first, last, state.slots[index]))
        self._queue = left

    def _request_again(self, transfer: bytes, state: _Transfer, key: Key, problem: str, now: float) -> None:
        """Request a piece again. After ``MAX_READS`` reads, fail the transfer; ``problem`` is the error's predicate."""
        wanted = state.wanted[key]
        if wanted.reads >= MAX_READS:
            self._fail(transfer, f"{self._peer} {problem}, after {MAX_READS} reads", now)
            return
        self.num_rereads += 1
        wanted.requested, wanted.begun = None, False
        self._queue.append((transfer, key))
        self._request(now)

    def _report(self, transfer: bytes, state: _Transfer, now: float) -> None:
        """Send ``Status``."""
        state.status_sent = now
        counts = list(state.layers.values())
        released = next((i for i, layers in enumerate(counts) if layers != self._num_layers), len(counts))
        self.outgoing.append(Status(transfer, state.num_offers, released))

    def _fail(self, transfer: bytes, message: str, now: float) -> None:
        self.events.append(Broken(transfer, Failure(Code.UNAVAILABLE, message)))
        self._end(transfer, now)

    def _end(self, transfer: bytes, now: float) -> None:
        """Remove a transfer, and send ``Stop``. Its slots of D's buffer that are still in use are released later."""
        state = self._transfers.pop(transfer)
        for index in [index for index in state.slots if index not in state.users]:
            self._buffer.release(state.slots.pop(index))
        if state.slots:
            self._orphans[transfer] = state
        self._stopping[transfer] = 1, now
        self.outgoing.append(Stop(transfer))


def new_transfer_id() -> bytes:
    """Random id for ``Start``."""
    return os.urandom(16)
