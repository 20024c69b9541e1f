"""Another node and its ranks, as the executor on node 0 sees them."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from ..step import encoder
from .layout import RankInfo
from .messages import Close
from .node_link import ALL_RANKS, NODE, NodeLink, NodeLostError
from .node_messages import GetPlaces, Join, Places, RankEnded, decode, encode
from .poller import PeerLostError, Poller

MAX_MESSAGE = 2**36
"""Maximum bytes of a worker's message: one with logits may be long."""
PLACES_TIMEOUT = 1.0
"""Seconds that a node has to say how far its ranks are."""


class RemoteNode:
    """A connection to a node whose ranks have been started.

    Args:
        pids: process ids of its ranks.
    """

    def __init__(self, link: NodeLink, join: Join, infos: list[RankInfo], pids: list[int]) -> None:
        self._link = link
        link.limit = MAX_MESSAGE
        self.name = f"node {join.node_rank} ({join.host_name}, {link.host})"
        self.ranks = [RemoteRank(self, info.world_rank, pid) for info, pid in zip(infos, pids, strict=True)]
        self._inboxes: dict[int, deque[bytes]] = {info.world_rank: deque() for info in infos}
        self.rank_ended: RankEnded | None = None
        self.lost = ""
        """Why the connection is lost; empty while it is there."""
        self._places: list[tuple[int, int, int]] | None = None
        self._alone = self._poller = Poller()
        self._alone.add_source(self)

    def join(self, poller: Poller) -> None:
        """Have ``poller`` wait for this node and others together."""
        self._poller = poller
        poller.add_source(self)

    @property
    def descriptor(self) -> int:
        """Readable when something may have arrived."""
        return self._link.descriptor

    def send(self, message: bytes, deadline: float) -> None:
        """Send a message to all ranks of the node. Raises ``TimeoutError`` and ``PeerLostError``."""
        try:
            self._link.send(message, ALL_RANKS, deadline, self._poller)
        except NodeLostError as error:
            self._note_loss(error)
            raise PeerLostError from error

    def fetch(self) -> bool:
        """Read and sort what has arrived, without waiting. Returns whether there was anything. Raises
        ``PeerLostError``."""
        found = False
        try:
            while taken := self._link.take() or (self._link.fetch() and self._link.take()):
                found = True
                channel, message = taken
                if channel in self._inboxes:
                    self._inboxes[channel].append(message)
                elif channel == NODE:
                    self._handle(message)
        except NodeLostError as error:
            self._note_loss(error)
            if not found:
                raise PeerLostError from error
        return found

    def receive(self, rank: int, deadline: float) -> bytes:
        """The next message of a rank; waits for it. Raises as ``send``."""
        inbox = self._inboxes[rank]
        while not inbox:
            if not self.fetch():
                self._poller.wait(deadline)
        return inbox.popleft()

    def has_message(self, rank: int) -> bool:
        if not self._inboxes[rank]:
            self.fetch()
        return bool(self._inboxes[rank])

    def drain(self) -> None:
        """Read what has arrived of a node that may be lost."""
        try:
            while self.fetch():
                pass
        except PeerLostError:
            pass

    def places(self) -> list[tuple[int, int, int]] | None:
        """How far each of its ranks has come; None where it does not answer."""
        deadline = time.monotonic() + PLACES_TIMEOUT
        try:
            self._link.send(encode(GetPlaces()), deadline=deadline, poller=self._alone)
            while self._places is None:
                self._alone.wait(deadline)
        except (NodeLostError, PeerLostError, TimeoutError):
            return None
        return self._places

    def ask_to_end(self, deadline: float) -> None:
        """Have its ranks end; it waits for node 0 again then."""
        try:
            self._link.send(encoder.encode(Close()), ALL_RANKS, deadline, self._alone)
        except (NodeLostError, PeerLostError, TimeoutError):
            self._link.close()

    def close(self, deadline: float) -> None:
        """Wait until it has closed the connection after ``ask_to_end``."""
        with suppress(PeerLostError, TimeoutError):
            while not self.lost and self.descriptor >= 0:
                self._alone.wait(deadline)
        self._link.close()

    def kill(self) -> None:
        """Close the connection, whereupon the node kills its ranks."""
        self._link.close()
        self.lost = self.lost or "it was closed here"

    def _note_loss(self, error: NodeLostError) -> None:
        self.lost = self.lost or str(error)

    def _handle(self, message: bytes) -> None:
        match decode(message):
            case RankEnded() as ended:
                self.rank_ended = self.rank_ended or ended
            case Places(places):
                self._places = places


@dataclass(frozen=True)
class RemoteRank:
    """A rank of another node, with the methods of ``RankProcess``."""

    node: RemoteNode
    rank: int
    pid: int

    def __str__(self) -> str:
        return f"the worker of rank {self.rank} (process {self.pid}) of {self.node.name}"

    def has_message(self) -> bool:
        return self.node.has_message(self.rank)

    def receive(self, deadline: float) -> bytes:
        return self.node.receive(self.rank, deadline)
