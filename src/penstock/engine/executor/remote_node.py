"""Another node and its ranks, as the executor on node 0 sees them."""

from __future__ import annotations

import select
import time
from collections import deque

from ..step import encoder
from .layout import RankInfo
from .messages import Close, FromWorker, from_worker
from .node_link import ALL_RANKS, MAX_POLL, NODE, NodeLink, NodeLostError
from .node_messages import GetPlaces, Join, Places, RankEnded, decode, encode
from .rank_process import CLOSE_TIMEOUT
from .ring import PeerLostError

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
        self._ended: select.epoll | None = None

    def watch(self, ended: select.epoll) -> None:
        """Have ``ended`` become readable when the connection is closed or lost."""
        self._ended = ended
        ended.register(self._link.socket, select.EPOLLRDHUP)

    def send(self, message: bytes, deadline: float) -> None:
        """Send a message to all ranks of the node. Raises ``TimeoutError`` and ``PeerLostError``."""
        try:
            self._link.send(message, ALL_RANKS, deadline, drain=True)
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
            if self.fetch():
                continue
            assert self._ended
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            waited = select.poll()
            waited.register(self._link.socket, select.POLLIN)
            waited.register(self._ended, select.POLLIN)
            ready = waited.poll(min(left, MAX_POLL) * 1000)
            if [descriptor for descriptor, _ in ready] == [self._ended.fileno()]:
                raise PeerLostError
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
            self._link.send(encode(GetPlaces()), deadline=deadline, drain=True)
            while self._places is None and (left := deadline - time.monotonic()) > 0:
                if not self.fetch():
                    select.select([self._link.socket], [], [], left)
        except (NodeLostError, PeerLostError, TimeoutError):
            return None
        return self._places

    def ask_to_end(self) -> None:
        """Have its ranks end; it waits for node 0 again then."""
        try:
            self._link.send(encoder.encode(Close()), ALL_RANKS, time.monotonic() + CLOSE_TIMEOUT, drain=True)
        except (NodeLostError, TimeoutError):
            self._link.close()

    def close(self) -> None:
        """Wait until it has closed the connection after ``ask_to_end``."""
        deadline = time.monotonic() + CLOSE_TIMEOUT
        try:
            while not self.lost and self._link.socket.fileno() >= 0 and (left := deadline - time.monotonic()) > 0:
                if not self.fetch():
                    select.select([self._link.socket], [], [], left)
        except PeerLostError:
            pass
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


class RemoteRank:
    """A rank of another node, with the methods of ``RankProcess``."""

    def __init__(self, node: RemoteNode, rank: int, pid: int) -> None:
        self.node = node
        self.rank = rank
        self.pid = pid

    def __str__(self) -> str:
        return f"the worker of rank {self.rank} (process {self.pid}) of {self.node.name}"

    def has_message(self) -> bool:
        return self.node.has_message(self.rank)

    def receive(self, deadline: float) -> FromWorker:
        message: FromWorker = from_worker.decode(self.node.receive(self.rank, deadline))
        return message
