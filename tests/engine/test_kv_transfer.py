"""KV transfers: the protocol's state machines with lost, late, repeated and reordered messages."""

from __future__ import annotations

import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core import Code, Failure
from penstock.engine.executor import node_link
from penstock.engine.kv_transfer.buffer import TransferBuffer
from penstock.engine.kv_transfer.endpoint import Endpoint
from penstock.engine.kv_transfer.link import PROTOCOL, KVTransferOptions
from penstock.engine.kv_transfer.messages import (
    SLOT_TOKENS,
    Data,
    Finished,
    Hello,
    Instance,
    Offer,
    Piece,
    Read,
    Start,
    Welcome,
    decode,
    encode,
    new_checksum,
    slot_hashes,
)
from penstock.engine.kv_transfer.receiver import Arrived, Broken, Completed, Pull, Receiver
from penstock.engine.kv_transfer.sender import Cancelled, Exported, Sender
from penstock.engine.kv_transfer.shared_memory import RemoteBuffer, address_of

LAYER_OFFSETS = [0, 32, 64, 96]
NUM_LAYERS = 3
TIMEOUT = 30.0


class KVTransfers(RuleBasedStateMachine):
    """A prefill engine, a decode engine, and the network between them. Each message is delivered, dropped, repeated or
    overtaken at random; pieces may arrive damaged. A slot's content is derived from its hash, to check every import."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill, self.decode = TransferBuffer(4, LAYER_OFFSETS), TransferBuffer(3, LAYER_OFFSETS)
        self.sender = Sender(self.prefill, "w", lease=TIMEOUT)
        self.receiver = Receiver(self.decode, TIMEOUT)
        self.now = 0.0
        self.to_prefill: list[bytes] = []
        self.to_decode: list[tuple[bytes, bytes]] = []
        self.computing: dict[bytes, tuple[Start, int]] = {}
        """Transfers that the prefill engine is computing → start message, number of exported slots."""
        self.partial: dict[bytes, tuple[list[Exported], int]] = {}
        """Transfers with an incomplete offer: only some layers of the newest slots → slots, number of layers."""
        self.pulling: dict[bytes, tuple[Pull, dict[tuple[int, int], bytes]]] = {}
        self.importing: list[tuple[Arrived, bytes]] = []
        """Pieces that the decode engine is importing, with their bytes on arrival."""
        self.ended: dict[bytes, str] = {}
        self.count = 0

    # --- The network

    def _pump(self) -> None:
        """Send all messages of both ends, and handle their events."""
        self.receiver.outgoing += [job.message for job in self.receiver.jobs]
        self.receiver.jobs.clear()
        self.to_prefill += map(encode, self.receiver.outgoing)
        self.receiver.outgoing.clear()
        self.to_decode += [(encode(message), b"") for message in self.sender.outgoing]
        self.sender.outgoing.clear()
        for sending in self.sender.sending:  # in this test, sending is a copy of the bytes
            message = sending.message
            data = bytes(self.prefill.layers(sending.slot, message.first_layer, message.last_layer))
            self.to_decode.append((encode(message), data))
            self.sender.sent(sending)
        self.sender.sending.clear()
        for event in self.sender.events:
            if isinstance(event, Cancelled):
                self.computing.pop(event.transfer, None)
                self.partial.pop(event.transfer, None)
            else:
                self.computing[event.transfer] = event, 0
        self.sender.events.clear()
        for event in self.receiver.events:
            if isinstance(event, Arrived):
                self.importing.append((event, self._bytes(event)))
            elif event.transfer in self.pulling:
                self.ended[event.transfer] = "completed" if isinstance(event, Completed) else "broken"
                if isinstance(event, Completed):
                    self._check_complete(event.transfer)
        self.receiver.events.clear()

    def _bytes(self, arrived: Arrived) -> bytes:
        return bytes(self.decode.layers(arrived.slot, arrived.first_layer, arrived.last_layer))

    def _check_complete(self, transfer: bytes) -> None:
        pull, pieces = self.pulling[transfer]
        waiting = {(each.index, each.first_layer) for each, _ in self.importing if each.transfer == transfer}
        for index in range(pull.start.first_slot, len(pull.hashes)):
            covered = {first for slot, first in {*pieces, *waiting} if slot == index}
            assert 0 in covered

    @precondition(lambda self: self.to_prefill)
    @rule(which=st.integers(0, 100), fate=st.sampled_from(["deliver"] * 6 + ["drop", "repeat"]))
    def message_to_prefill(self, which: int, fate: str) -> None:
        at = which % len(self.to_prefill) if which > 60 else 0
        data = self.to_prefill[at] if fate == "repeat" else self.to_prefill.pop(at)
        if fate != "drop":
            self.sender.receive(decode(data), self.now)  # type: ignore[arg-type]
        self._pump()

    @precondition(lambda self: self.to_decode)
    @rule(which=st.integers(0, 100), fate=st.sampled_from(["deliver"] * 7 + ["drop", "repeat", "damage"]))
    def message_to_decode(self, which: int, fate: str) -> None:
        at = which % len(self.to_decode) if which > 60 else 0
        encoded, data = self.to_decode[at] if fate == "repeat" else self.to_decode.pop(at)
        if fate == "drop":
            return
        message = decode(encoded)
        if isinstance(message, Data):
            job = self.receiver.job_of(message)
            if job is None or not self.receiver.begin(job):
                return
            damaged = bytearray(data)
            if fate == "damage":
                damaged[which % len(damaged)] ^= 1 << which % 8
            self.receiver.bytes_of(job)[:] = damaged
            checksum = self.receiver.new_checksum(job)
            checksum.update(damaged)
            self.receiver.verify(job, checksum.intdigest(), self.now)
        else:
            self.receiver.receive(message, self.now)  # type: ignore[arg-type]
        self._pump()

    @initialize(seed=st.integers(0, 2**32), faults=st.sampled_from([0.0, 0.02, 0.2]))
    def begin(self, seed: int, faults: float) -> None:
        self._work(seed, 300, faults)

    @rule(seed=st.integers(0, 2**32), steps=st.integers(100, 500), faults=st.sampled_from([0.0, 0.02, 0.2]))
    def traffic(self, seed: int, steps: int, faults: float) -> None:
        self._work(seed, steps, faults)

    def _work(self, seed: int, steps: int, faults: float) -> None:
        """Deliver messages, most of them without faults, while both engines compute and import."""
        rng = random.Random(seed)

        def fate(kinds: str) -> tuple[int, str]:
            if rng.random() < faults:
                return rng.randrange(100), rng.choice(kinds.split())
            return 0, "deliver"

        for _ in range(steps):
            actions = [lambda: self.time_passes(rng.choice([0.01, 0.1, 0.3, 0.6]))]
            if self.to_prefill:
                actions += [lambda: self.message_to_prefill(*fate("deliver drop repeat repeat"))] * 4
            if self.to_decode:
                actions += [lambda: self.message_to_decode(*fate("deliver drop repeat repeat damage"))] * 4
            if self.importing:
                actions += [lambda: self.import_piece(rng.randrange(100))] * 2
            if self.computing:
                actions += [lambda: self.compute(rng.randrange(100), rng.randint(1, 3))] * 2
            if len(self.pulling) < 40 and rng.random() < 0.06:
                self.pull(rng.randint(1, 6), rng.randint(0, 2), rng.randint(1, SLOT_TOKENS))
            rng.choice(actions)()

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.6, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.sender.expire(self.now)
        self.receiver.tick(self.now)
        self._pump()

    @rule()
    def connection_lost(self) -> None:
        self.to_prefill.clear()
        self.to_decode.clear()
        self.sender.close()
        self.receiver.close("lost", self.now)
        self._pump()

    @property
    def _idle(self) -> bool:
        free = self.prefill.num_free == self.prefill.num_slots and self.decode.num_free == self.decode.num_slots
        return free and not (self.to_prefill or self.to_decode or self.computing)

    # --- The decode engine

    @precondition(lambda self: len(self.pulling) < 40)
    @rule(slots=st.integers(1, 6), first=st.integers(0, 2), tail=st.integers(1, SLOT_TOKENS))
    def pull(self, slots: int, first: int, tail: int) -> None:
        self.count += 1
        tokens = [self.count, *range((slots - 1) * SLOT_TOKENS + tail - 1)]
        transfer = self.count.to_bytes(16, "little")
        start = Start(transfer, "r", tokens, min(first, slots - 1), "", "", "", 0, 0.0)
        self.pulling[transfer] = Pull(start=start, hashes=slot_hashes("w", "", "", tokens)), {}
        self.receiver.start(self.pulling[transfer][0], self.now)
        self._pump()

    @precondition(lambda self: self.importing)
    @rule(which=st.integers(0, 100))
    def import_piece(self, which: int) -> None:
        arrived, expected = self.importing.pop(which % len(self.importing))
        data = self._bytes(arrived)
        assert data == expected, "a slot was written while it was being read"
        pull, pieces = self.pulling[arrived.transfer]
        content = _content(pull.hashes[arrived.index])
        span = slice(LAYER_OFFSETS[arrived.first_layer], LAYER_OFFSETS[arrived.last_layer])
        assert data == content[span], "wrong keys and values"
        assert (arrived.index, arrived.first_layer) not in pieces, "a piece was imported twice"
        pieces[arrived.index, arrived.first_layer] = data
        self.receiver.imported(arrived, self.now)
        self._pump()

    @precondition(lambda self: self.pulling)
    @rule(which=st.integers(0, 100))
    def stop(self, which: int) -> None:
        transfer = list(self.pulling)[which % len(self.pulling)]
        self.receiver.stop(transfer, self.now)
        self.ended.setdefault(transfer, "stopped")
        self._pump()

    # --- The prefill engine

    @precondition(lambda self: self.computing)
    @rule(which=st.integers(0, 100), layers=st.integers(1, 3))
    def compute(self, which: int, layers: int) -> None:
        """Export up to ``layers`` more layers of a transfer's next slot."""
        transfer = list(self.computing)[which % len(self.computing)]
        start, done = self.computing[transfer]
        hashes = slot_hashes("w", "", "", start.tokens)
        if transfer in self.partial:
            exported, first = self.partial.pop(transfer)
        else:
            if (allocated := self.prefill.allocate()) is None:
                return
            exported, first = [Exported(start.first_slot + done, *allocated)], 0
        last = min(first + layers, NUM_LAYERS)
        for each in exported:
            begin, end = LAYER_OFFSETS[first], LAYER_OFFSETS[last]
            content = np.frombuffer(_content(hashes[each.index]), np.uint8)
            self.prefill.data[each.slot, begin:end] = content[begin:end]
        self.sender.offer(transfer, exported, first, last, self.now)
        if last < NUM_LAYERS:
            self.partial[transfer] = exported, last
        elif start.first_slot + done + 1 == len(hashes):
            del self.computing[transfer]
            self.sender.finish(transfer, 0, self.now)
        else:
            self.computing[transfer] = start, done + 1
        self._pump()

    @precondition(lambda self: self.computing)
    @rule(which=st.integers(0, 100))
    def computation_fails(self, which: int) -> None:
        transfer = list(self.computing)[which % len(self.computing)]
        del self.computing[transfer]
        self.partial.pop(transfer, None)
        self.sender.fail(transfer, Failure(Code.INTERNAL, "failed"), self.now)
        self._pump()

    @invariant()
    def slots_are_counted(self) -> None:
        used = {each.slot for each, _ in self.importing}
        assert len(used) <= self.decode.num_slots - self.decode.num_free

    def teardown(self) -> None:
        """Complete all transfers without faults; then all slots must be free."""
        for _ in range(300):
            if set(self.ended) == set(self.pulling) and self._idle:
                break
            while self.to_prefill:
                self.message_to_prefill(0, "deliver")
            while self.to_decode:
                self.message_to_decode(0, "deliver")
            while self.importing:
                self.import_piece(0)
            for which in range(len(self.computing)):
                if which < len(self.computing):
                    self.compute(which, 3)
            self.time_passes(0.6)
        assert set(self.ended) == set(self.pulling), "a transfer did not end"
        assert self.prefill.num_free == self.prefill.num_slots
        assert self.decode.num_free == self.decode.num_slots
        self.prefill.close()
        self.decode.close()


def _content(slot_hash: bytes) -> bytes:
    """Return the keys and values of a slot, derived from its hash."""
    return np.random.default_rng(int.from_bytes(slot_hash, "little")).bytes(LAYER_OFFSETS[-1])


TestKVTransfers = KVTransfers.TestCase
TestKVTransfers.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


# --- Receiver and endpoint


def test_slow_pieces_are_not_requested_again() -> None:
    """The pieces arrive one at a time, and all of them together take longer than the timeout."""
    buffer = TransferBuffer(12, LAYER_OFFSETS)
    receiver = Receiver(buffer, timeout=4.0)
    pull = _pull(12)
    receiver.start(pull, 0.0)
    pieces = [Piece(i, i, 1, _checksum(pull, i)) for i in range(12)]
    receiver.receive(Offer(b"t", 0, 0, NUM_LAYERS, pieces), 0.0)
    receiver.receive(Finished(b"t", 1, 0), 0.0)
    jobs, now = list(receiver.jobs), 0.0
    assert len(jobs) == 12
    for job in jobs:
        for _ in range(9):
            now += 0.1
            receiver.tick(now)
        assert receiver.begin(job)
        receiver.verify(job, job.piece.checksum, now)
    assert len(receiver.jobs) == 12
    assert not receiver.num_rereads
    assert isinstance(receiver.events[-1], Completed)
    buffer.close()


def test_lost_piece_is_requested_again() -> None:
    """The lost piece is requested again after the timeout, although other pieces arrive."""
    buffer = TransferBuffer(4, LAYER_OFFSETS)
    receiver = Receiver(buffer, timeout=4.0)
    pull = _pull(4)
    receiver.start(pull, 0.0)
    for i in range(4):
        offer = Offer(b"t", i, 0, NUM_LAYERS, [Piece(i, i, 1, _checksum(pull, i))])
        receiver.receive(offer, i / 10)
    lost, *others = receiver.jobs
    receiver.jobs.clear()
    for i, job in enumerate(others):
        assert receiver.begin(job)
        receiver.verify(job, job.piece.checksum, 0.5 + 0.4 * i)
    receiver.tick(1.4)
    assert receiver.jobs == [lost]
    buffer.close()


def _pull(slots: int) -> Pull:
    tokens = list(range(slots * SLOT_TOKENS))
    return Pull(start=Start(b"t", "r", tokens, 0, "", "", "", 0, 0.0), hashes=slot_hashes("w", "", "", tokens))


def _checksum(pull: Pull, index: int) -> int:
    """Return the checksum of a slot with zeros."""
    checksum = new_checksum(pull.hashes[index], 1, 0, NUM_LAYERS)
    checksum.update(bytes(LAYER_OFFSETS[-1]))
    return checksum.intdigest()


SECRET = b"of these tests"
INSTANCE = Instance(weights_version="w", fingerprint="f", layers=[(1, 1, "float32")])


class Peer:
    """Peer of an endpoint, driven by the test."""

    def __init__(self, link: node_link.NodeLink) -> None:
        self.socket = link.socket
        self.socket.settimeout(10)

    def send(self, *messages: Any) -> None:
        for message in messages:
            encoded = encode(message)
            self.socket.sendall(len(encoded).to_bytes(4, "little") + encoded)

    def receive(self) -> Any:
        size = int.from_bytes(self.socket.recv(4, socket.MSG_WAITALL), "little")
        return decode(self.socket.recv(size, socket.MSG_WAITALL))


class Running:
    """A running endpoint with its transfer buffer."""

    def __init__(self, slots: int, slot_bytes: int, **options: Any) -> None:
        self.buffer = TransferBuffer(slots, [0, slot_bytes])
        self._woken = threading.Semaphore(0)
        self.endpoint = Endpoint(
            INSTANCE,
            self.buffer,
            [(range(1), [0])],
            KVTransferOptions(secret=SECRET, **options),
            self._woken.release,
        )

    def event(self) -> Any:
        """Wait for the endpoint's next event, which must be a single one."""
        while not (events := self.endpoint.take_events()):
            assert self._woken.acquire(timeout=10)
        [event] = events
        return event

    def connect(self) -> Peer:
        return Peer(node_link.connect(("127.0.0.1", self.endpoint.port), SECRET, PROTOCOL))

    def close(self) -> None:
        self.endpoint.close()
        self.buffer.close()


def test_decode_engine_that_stops_reading_loses_its_slots() -> None:
    """The decode engine requests more bytes than the sockets hold, then stops reading. Its slots are freed."""
    running = Running(32, 2**20, listen="127.0.0.1:0", timeout=0.5, transport="tcp")
    peer, tokens = running.connect(), list(range(32 * SLOT_TOKENS))
    try:
        peer.send(Hello(INSTANCE), Start(b"t", "r", tokens, 0, "", "", "", 0, 0.0))
        assert isinstance(running.event(), Start)
        exported = [Exported(i, *running.buffer.allocate()) for i in range(32)]  # type: ignore[misc]
        running.endpoint.offer(b"t", exported, 0, 1)
        while not isinstance(peer.receive(), Offer):
            pass
        peer.send(*(Read(b"t", each.index, each.slot, each.epoch, 0, 1) for each in exported))
        assert running.event() == Cancelled(b"t")
        end = time.monotonic() + 10
        while running.buffer.num_free < 32:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        peer.socket.close()
        running.close()


def test_connection_to_silent_prefill_engine_is_renewed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)
    running = Running(4, 64, timeout=0.5)
    peers = []
    try:
        for transfer in (b"t1", b"t2"):
            start = Start(transfer, "r", [1] * SLOT_TOKENS, 0, "", "", "", 0, 0.0)
            pull = Pull(start=start, hashes=slot_hashes("w", "", "", start.tokens))
            running.endpoint.pull(f"127.0.0.1:{listener.getsockname()[1]}", pull)
            peers.append(Peer(node_link.accept(listener.accept()[0], SECRET, PROTOCOL)))
            assert isinstance(peers[-1].receive(), Hello)
            peers[-1].send(Welcome(INSTANCE))
            assert isinstance(running.event(), Broken)
    finally:
        running.close()
        for each in [listener, *(peer.socket for peer in peers)]:
            each.close()


def test_silent_unauthenticated_connections_block_no_peer() -> None:
    running = Running(4, 64, listen="127.0.0.1:0", timeout=5.0)
    strangers = [socket.create_connection(("127.0.0.1", running.endpoint.port)) for _ in range(100)]
    try:
        for each in strangers:
            each.recv(1)  # wait for the challenge
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        peer = running.connect()
        peer.send(Hello(INSTANCE), Start(b"t", "r", [1], 0, "", "", "", 0, 0.0))
        assert isinstance(running.event(), Start)
        peer.socket.close()
    finally:
        for each in strangers:
            each.close()
        running.close()


def test_only_transfer_buffers_are_opened(tmp_path: Path) -> None:
    """A peer cannot make the engine open another file."""
    buffer = TransferBuffer(1, [0, 64])
    copy = tmp_path / "copy"
    copy.write_bytes(Path(buffer.path).read_bytes())
    address = address_of(buffer)
    RemoteBuffer(address)
    for path in (str(copy), f"/proc/self/root{copy}", f"/proc/../{copy}"):
        with pytest.raises(OSError, match="is not the path of a transfer buffer"):
            RemoteBuffer(msgspec.structs.replace(address, path=path))
    buffer.close()
