"""A ring buffer in shared memory that carries messages from one process to another (Linux).

Two kernel counters (``eventfd``) hold the bytes that were written and not yet noticed by the reader, and those that
were read and not yet noticed by the writer. A process that waits polls its counter, and the other process's end.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import msgspec

from .poller import Poller

HEADER = 8
"""Bytes of a message's length, which precedes it, little-endian."""


class Descriptors(msgspec.Struct, frozen=True):
    """File descriptors of a ring. The other process inherits them."""

    memory: int
    written: int
    read: int
    capacity: int

    @classmethod
    def create(cls, capacity: int) -> Descriptors:
        """Create a ring of ``capacity`` bytes."""
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
        own_eventfd: counter of bytes that this end may use: bytes to read, or free bytes to write.
        peer_eventfd: counter to which this end adds the bytes that it has used.
        available: bytes that this end may use at first.
        poller: waits for the other process, and notices its end.
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
        """Whether there are bytes to use."""
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
    """The end that sends messages.

    Args:
        descriptors: of the ring.
        poller: waits for the reader's process, and notices its end.
    """

    def __init__(self, descriptors: Descriptors, poller: Poller) -> None:
        super().__init__(descriptors, descriptors.read, descriptors.written, descriptors.capacity, poller)

    def send(self, message: bytes, deadline: float = float("inf")) -> None:
        """Send one message of any length. One that does not fit into the ring is written in parts, as it is read.

        Args:
            deadline: on the monotonic clock.

        Raises ``TimeoutError`` where the other end does not read until the deadline, and ``PeerLostError``.
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
    """The end that receives messages.

    Args:
        descriptors: of the ring.
        poller: waits for the writer's process, and notices its end.
    """

    def __init__(self, descriptors: Descriptors, poller: Poller) -> None:
        super().__init__(descriptors, descriptors.written, descriptors.read, 0, poller)
        self.descriptor = descriptors.written
        """Readable when there may be a message."""
        self._buffer = bytearray()
        """Bytes that were fetched from the ring and not yet returned."""

    def has_message(self) -> bool:
        """Whether a message has begun to arrive; ``receive`` may still have to wait for the rest of it."""
        return self.fetch() or bool(self._buffer)

    def fetch(self) -> bool:
        """Move bytes from the ring to a buffer of this process, without waiting. Returns whether there were any."""
        found = False
        while self._has_available():
            count = min(self._available, self._capacity - self._offset)
            self._buffer += self._memory[self._offset : self._offset + count]
            self._use(count)
            found = True
        return found

    def receive(self, deadline: float = float("inf")) -> bytes:
        """Wait for the next message.

        Args:
            deadline: on the monotonic clock.

        Raises ``TimeoutError`` where it has not come until then, and ``PeerLostError``.
        """
        while True:
            if len(self._buffer) >= HEADER:
                end = HEADER + int.from_bytes(self._buffer[:HEADER], "little")
                if len(self._buffer) >= end:
                    message = bytes(self._buffer[HEADER:end])
                    del self._buffer[:end]
                    return message
            if not self.fetch():
                self._poller.wait(deadline, self._own_eventfd)
