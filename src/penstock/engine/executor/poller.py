"""Waiting for what other processes and nodes send, and for their end."""

from __future__ import annotations

import select
import time
from typing import Protocol

MAX_POLL = 3600.0
"""Maximum seconds of one ``poll``, whose timeout must be finite."""


class PeerLostError(RuntimeError):
    """A process has ended, or the connection to another node is lost."""


class Source(Protocol):
    """The receiving end of a ring or a connection."""

    @property
    def descriptor(self) -> int:
        """Readable when something may have arrived."""
        ...

    def fetch(self) -> bool:
        """Move what has arrived to a buffer of this process, without waiting. Returns whether there was anything."""
        ...


class Poller:
    """Waits for one source, or to send something, and meanwhile fetches from all sources. Otherwise processes could
    wait for each other in a circle: this one for a rank to read, the rank for another one that has to take its hidden
    states, and that one for this process to read a long reply.

    Args:
        peers: descriptors that become readable when another process ends.
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
        """Wait until something was fetched, or ``descriptor`` is ready for ``events``. May return early.

        Raises ``TimeoutError``, ``PeerLostError`` where a process has ended and there is nothing else, and what sources
        raise.
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
