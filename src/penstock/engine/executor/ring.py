"""A bounded ring of bytes in shared memory, from one process to another (Linux).

The bytes lie in memory that both map; how many there are, and how many were read, is told by two counters of the kernel
(``eventfd``). Whoever waits sleeps in ``poll`` beside a descriptor that becomes readable when the other process ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time

import msgspec

LONGEST_POLL = 3600.0
"""Seconds that one system call waits."""
HEADER = 8
"""Bytes before each message: its length."""


class PeerLostError(RuntimeError):
    """The process at the other end has ended."""


class Descriptors(msgspec.Struct, frozen=True):
    """File descriptors of a ring, which the other process inherits."""

    memory: int
    written: int
    read: int
    capacity: int

    @classmethod
    def create(cls, capacity: int) -> Descriptors:
        """A ring of so many bytes."""
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


class _End:
    """One end of a ring.

    Args:
        mine: counts what this end may use: bytes to read, or room to write.
        theirs: where this end tells the other what it has used.
        peer: becomes readable when the other process ends.
    """

    def __init__(self, descriptors: Descriptors, mine: int, theirs: int, available: int, peer: int) -> None:
        self._memory = mmap.mmap(descriptors.memory, descriptors.capacity)
        self._capacity = descriptors.capacity
        self._mine = mine
        self._theirs = theirs
        self._available = available
        self._at = 0
        self._peer = peer
        self._poll = select.poll()
        self._poll.register(mine, select.POLLIN)
        self._poll.register(peer, select.POLLIN)

    def _look(self) -> bool:
        """Whether there is something to use."""
        if not self._available:
            with contextlib.suppress(BlockingIOError):
                self._available = os.eventfd_read(self._mine)
        return self._available > 0

    def _await(self, deadline: float, meanwhile: Reader | None = None) -> None:
        """Until there is something to use. Raises ``TimeoutError`` and ``PeerLostError``."""
        while not self._look():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            waited = self._poll
            if meanwhile:
                waited = select.poll()
                for descriptor in (self._mine, self._peer, meanwhile.descriptor):
                    waited.register(descriptor, select.POLLIN)
            ready = waited.poll(min(left, LONGEST_POLL) * 1000)
            if meanwhile and meanwhile.take():
                continue
            if [descriptor for descriptor, _ in ready] == [self._peer]:
                raise PeerLostError

    def _use(self, count: int) -> None:
        self._at = (self._at + count) % self._capacity
        self._available -= count
        os.eventfd_write(self._theirs, count)

    def close(self) -> None:
        self._memory.close()


class Writer(_End):
    """The end that sends messages."""

    def __init__(self, descriptors: Descriptors, peer: int) -> None:
        super().__init__(descriptors, descriptors.read, descriptors.written, descriptors.capacity, peer)

    def send(self, message: bytes, deadline: float = float("inf"), meanwhile: Reader | None = None) -> None:
        """Send one message of any length; one that does not fit is written as it is read.

        Args:
            deadline: on the monotonic clock.
            meanwhile: what the other end sends is taken in, so that both cannot wait for each other.

        Raises ``TimeoutError`` where the other end does not read, and ``PeerLostError``.
        """
        left = memoryview(len(message).to_bytes(HEADER, "little") + message)
        while left:
            self._await(deadline, meanwhile)
            count = min(len(left), self._available, self._capacity - self._at)
            self._memory[self._at : self._at + count] = left[:count]
            left = left[count:]
            self._use(count)


class Reader(_End):
    """The end that receives messages."""

    def __init__(self, descriptors: Descriptors, peer: int) -> None:
        super().__init__(descriptors, descriptors.written, descriptors.read, 0, peer)
        self.descriptor = descriptors.written
        """Readable when there may be a message."""
        self._got = bytearray()

    def waiting(self) -> bool:
        """Whether a message has come, be it in part."""
        return bool(self._got) or self._look()

    def take(self) -> bool:
        """Take in what there is, so that there is room for more; whether there was any."""
        if not self._look():
            return False
        count = min(self._available, self._capacity - self._at)
        self._got += self._memory[self._at : self._at + count]
        self._use(count)
        return True

    def receive(self, deadline: float = float("inf")) -> bytes:
        """The next message.

        Raises ``TimeoutError`` where there is none until then, and ``PeerLostError``.
        """
        while True:
            if len(self._got) >= HEADER:
                end = HEADER + int.from_bytes(self._got[:HEADER], "little")
                if len(self._got) >= end:
                    message = bytes(self._got[HEADER:end])
                    del self._got[:end]
                    return message
            self._await(deadline)
            self.take()
