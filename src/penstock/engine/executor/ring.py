"""A ring buffer in shared memory that carries messages from one process to another (Linux).

Two kernel counters (``eventfd``) hold the number of written bytes that the reader has not counted yet, and the number
of read bytes that the writer has not counted yet. A waiting process polls its counter and the other process's pidfd.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import msgspec

from .poller import Poller

HEADER = 8
"""Size of the length prefix of a message, bytes (little-endian)."""


class Descriptors(msgspec.Struct, frozen=True):
    """File descriptors of a ring, inherited by the other process."""

    memory: int
    written: int
    """``eventfd`` that counts the bytes written to the ring."""
    read: int
    """``eventfd`` that counts the bytes read from the ring."""
    capacity: int
    """Size of the ring, bytes."""

    @classmethod
    def create(cls, capacity: int) -> Descriptors:
        memory = os.memfd_create("penstock-ring", os.MFD_CLOEXEC)
        os.ftruncate(memory, capacity)
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        return cls(memory, os.eventfd(0, flags), os.eventfd(0, flags), capacity)

    @property
    def all(self) -> tuple[int, int, int]:
        return self.memory, self.written, self.read

    def close(self) -> None:
        for descriptor in self.all:
            os.close(descriptor)


class _RingEndpoint:
    """One end of a ring.

    Args:
        own_eventfd: counter of the bytes that became available to this end: bytes to read, or free bytes to write.
        peer_eventfd: counter to which this end adds the bytes that it has read or written.
        available: initial number of bytes to read, or of free bytes to write.
        poller: waits for the other process and detects its end.
    """

    def __init__(
        self, descriptors: Descriptors, own_eventfd: int, peer_eventfd: int, available: int, poller: Poller
    ) -> None:
        self._memory = mmap.mmap(descriptors.memory, descriptors.capacity)
        self._capacity = descriptors.capacity
        self._own_eventfd = own_eventfd
        self._peer_eventfd = peer_eventfd
        self._available = available
        self._offset = 0
        self._poller = poller

    def _has_available(self) -> bool:
        if not self._available:
            with contextlib.suppress(BlockingIOError):
                self._available = os.eventfd_read(self._own_eventfd)
        return self._available > 0

    def _use(self, count: int) -> None:
        self._offset = (self._offset + count) % self._capacity
        self._available -= count
        os.eventfd_write(self._peer_eventfd, count)

    def close(self) -> None:
        self._memory.close()


class Writer(_RingEndpoint):
    """The end of a ring that sends messages."""

    def __init__(self, descriptors: Descriptors, poller: Poller) -> None:
        super().__init__(descriptors, descriptors.read, descriptors.written, descriptors.capacity, poller)

    def send(self, message: bytes, deadline: float = float("inf")) -> None:
        """Send a message of any length. A message longer than the ring's free space is written in parts as the other
        end reads.

        Raises ``TimeoutError`` if the message is not written by the deadline (monotonic clock), and ``PeerLostError``.
        """
        left = memoryview(len(message).to_bytes(HEADER, "little") + message)
        while left:
            while not self._has_available():
                self._poller.wait(deadline, self._own_eventfd)
            count = min(len(left), self._available, self._capacity - self._offset)
            self._memory[self._offset : self._offset + count] = left[:count]
            left = left[count:]
            self._use(count)


class Reader(_RingEndpoint):
    """The end of a ring that receives messages."""

    def __init__(self, descriptors: Descriptors, poller: Poller) -> None:
        super().__init__(descriptors, descriptors.written, descriptors.read, 0, poller)
        self.descriptor = descriptors.written
        """File descriptor that is readable when there may be a message."""
        self._buffer = bytearray()
        """Bytes fetched from the ring and not yet returned."""

    def has_message(self) -> bool:
        """True if at least a part of a message has arrived; ``receive`` may still have to wait for the other parts."""
        return self.fetch() or bool(self._buffer)

    def fetch(self) -> bool:
        """Move bytes from the ring to a buffer in this process, without waiting. Returns True if bytes were moved."""
        found = False
        while self._has_available():
            count = min(self._available, self._capacity - self._offset)
            self._buffer += self._memory[self._offset : self._offset + count]
            self._use(count)
            found = True
        return found

    def receive(self, deadline: float = float("inf")) -> bytes:
        """Wait for the next message. Raises ``TimeoutError`` at the deadline (monotonic clock), and
        ``PeerLostError``."""
        while True:
            if len(self._buffer) >= HEADER:
                end = HEADER + int.from_bytes(self._buffer[:HEADER], "little")
                if len(self._buffer) >= end:
                    message = bytes(self._buffer[HEADER:end])
                    del self._buffer[:end]
                    return message
            if not self.fetch():
                self._poller.wait(deadline, self._own_eventfd)
