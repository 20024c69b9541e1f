"""Waits for messages from other processes and nodes, and for the end of processes."""

from __future__ import annotations

import select
import time
from typing import Protocol

MAX_POLL = 3600.0
"""Maximum timeout of one ``poll``, seconds: a finite limit for waits without a deadline."""


class PeerLostError(RuntimeError):
    """A process has ended, or the connection to another node is lost."""


class Source(Protocol):
    """The receiving end of a ring or a connection."""

    @property
    def descriptor(self) -> int:
        """File descriptor that is readable when data may have arrived."""
        ...

    def fetch(self) -> bool:
        """Move arrived data to a buffer in this process, without waiting. Returns True if data was moved."""
        ...


class Poller:
    """Waits until data arrives or can be sent, and meanwhile fetches from all sources.

    Fetching from all sources prevents a deadlock, in which this process waits for rank A to read, rank A waits for
    rank B to take its hidden states, and rank B waits for this process to read a long reply.

    Args:
        peers: pidfds of peer processes (readable once the process has ended).
    """

    def __init__(self, *peers: int) -> None:
        self._peers: set[int] = set()
        self._sources: dict[int, Source] = {}
        self._poll = select.poll()
        for peer in peers:
            self.add_peer(peer)

    def add_peer(self, peer: int) -> None:
        self._peers.add(peer)
        self._poll.register(peer, select.POLLIN)

    def add_source(self, source: Source) -> None:
        self._sources[source.descriptor] = source
        self._poll.register(source.descriptor, select.POLLIN)

    def wait(self, deadline: float, descriptor: int | None = None, events: int = select.POLLIN) -> None:
        """Wait until data was fetched, or ``descriptor`` is ready for ``events``. May return early.

        Raises ``TimeoutError`` at the deadline (monotonic clock), ``PeerLostError`` if a process has ended and nothing
        else is ready, and the errors of ``Source.fetch``.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if descriptor is not None:
            self._poll.register(descriptor, events | (select.POLLIN if descriptor in self._sources else 0))
        try:
            ready = [number for number, _ in self._poll.poll(min(left, MAX_POLL) * 1000)]
        finally:
            if descriptor in self._sources:
                self._poll.register(descriptor, select.POLLIN)
            elif descriptor is not None:
                self._poll.unregister(descriptor)
        for number in ready:
            if source := self._sources.get(number):
                source.fetch()
        if ready and self._peers.issuperset(ready):
            raise PeerLostError
