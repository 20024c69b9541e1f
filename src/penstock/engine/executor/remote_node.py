"""The executor's handles of another node and of its ranks."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from ..step import encoder
from .layout import RankInfo
from .messages import Close
from .node_link import ALL_RANKS, NODE, NodeLink, NodeLostError
from .node_messages import GetProgress, Join, RankEnded, RankProgress, decode, encode
from .poller import PeerLostError, Poller

MAX_MESSAGE = 2**36
"""Maximum size of a worker's message, bytes. Messages with logits may be large."""
PROGRESS_TIMEOUT = 1.0
"""Maximum seconds to wait for a node's ``RankProgress``."""


class RemoteNode:
    """A connection to a node that has started its ranks.

    Args:
        infos: ranks of the node.
        pids: process ids of these ranks.
    """

    def __init__(self, link: NodeLink, join: Join, infos: list[RankInfo], pids: list[int]) -> None:
        self._link = link
        link.limit = MAX_MESSAGE
        self.name = f"node {join.node_rank} ({join.host_name}, {link.host})"
        self.ranks = [RemoteRank(self, info.world_rank, pid) for info, pid in zip(infos, pids, strict=True)]
        self._inboxes: dict[int, deque[bytes]] = {info.world_rank: deque() for info in infos}
        self.rank_ended: RankEnded | None = None
        self.lost = ""
        """Reason why the connection is lost; empty while it is connected."""
        self._progress: list[tuple[int, int, int]] | None = None
        self._alone = self._poller = Poller()
        self._alone.add_source(self)

    def join(self, poller: Poller) -> None:
        """Use ``poller``, which the other nodes and the local ranks share, for waiting."""
        self._poller = poller
        poller.add_source(self)

    @property
    def descriptor(self) -> int:
        """File descriptor that is readable when data may have arrived."""
        return self._link.descriptor

    def send(self, message: bytes, deadline: float) -> None:
        """Send an encoded message to all ranks of the node. Raises ``TimeoutError`` and ``PeerLostError``."""
        try:
            self._link.send(message, ALL_RANKS, deadline, self._poller)
        except NodeLostError as error:
            self._note_loss(error)
            raise PeerLostError from error

    def fetch(self) -> bool:
        """Read the messages that have arrived, without waiting. Returns True if a message was read. Raises
        ``PeerLostError`` if the connection is lost."""
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
        """Wait for the next message of a rank. Raises ``TimeoutError`` and ``PeerLostError``."""
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
        """Read the messages that have arrived, even if the connection is lost."""
        with suppress(PeerLostError):
            while self.fetch():
                pass

    def progress(self) -> list[tuple[int, int, int]] | None:
        """Progress of each rank of the node (``shared_memory.RankProgress``); None if the node does not answer."""
        deadline = time.monotonic() + PROGRESS_TIMEOUT
        try:
            self._link.send(encode(GetProgress()), deadline=deadline, poller=self._alone)
            while self._progress is None:
                self._alone.wait(deadline)
        except (NodeLostError, PeerLostError, TimeoutError):
            return None
        return self._progress

    def send_close(self, deadline: float) -> None:
        """End the ranks of the node. The node then waits for node 0's next engine."""
        try:
            self._link.send(encoder.encode(Close()), ALL_RANKS, deadline, self._alone)
        except (NodeLostError, PeerLostError, TimeoutError):
            self._link.close()

    def close(self, deadline: float) -> None:
        """Wait until the node has closed the connection after ``send_close``, and close this end."""
        with suppress(PeerLostError, TimeoutError):
            while not self.lost and self.descriptor >= 0:
                self._alone.wait(deadline)
        self._link.close()

    def kill(self) -> None:
        """Close the connection. The node then kills its ranks."""
        self._link.close()
        self.lost = self.lost or "connection closed by node 0"

    def _note_loss(self, error: NodeLostError) -> None:
        self.lost = self.lost or str(error)

    def _handle(self, message: bytes) -> None:
        match decode(message):
            case RankEnded() as ended:
                self.rank_ended = self.rank_ended or ended
            case RankProgress(progress):
                self._progress = progress


@dataclass(frozen=True)
class RemoteRank:
    """A rank on another node, with the receiving methods of ``RankProcess``."""

    node: RemoteNode
    rank: int
    pid: int

    def __str__(self) -> str:
        return f"the worker of rank {self.rank} (process {self.pid}) of {self.node.name}"

    def has_message(self) -> bool:
        return self.node.has_message(self.rank)

    def receive(self, deadline: float) -> bytes:
        return self.node.receive(self.rank, deadline)
