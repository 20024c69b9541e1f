"""A connection between two nodes: authenticated by their cluster's secret, then messages of any length both ways.

What is sent is not encrypted.

Why not ZeroMQ with CURVE, as between routers and engines: sockets of ranks and of KV transfers need this handshake and
a listener all the same, which ZeroMQ cannot share, so that node 0 would need a second port; a ``ROUTER`` does not
report which peer it has lost; and ZeroMQ has one limit on messages, before authentication and after it.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import time
from typing import TypeVar

import msgspec

from penstock.version import __version__

from .poller import MAX_POLL, Poller

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a peer has to prove that it knows the secret."""
MAX_HANDSHAKE_BYTES = 1024
"""Maximum size of a message before that."""
MAX_NODE_MESSAGE = 2**20
"""Maximum size of a message that is not one of the workers'."""
HEADER = 12
"""Bytes before a message: its length (8, little-endian) and its channel (4, signed)."""
NODE, ALL_RANKS = -1, -2
"""Channels: of the nodes themselves, and of all ranks of a node. Others are the numbers of ranks."""
RECEIVE_BYTES = 2**20
NODES = "penstock nodes 1"
"""Protocol of the connections between nodes."""
DEFAULT_TIMEOUT = 60.0
"""``engine_iteration_timeout`` for connections where there is none."""

MAX_KEEPALIVE, MAX_KEEPALIVE_PROBES = 32767, 127
"""The kernel's: seconds between two probes, and their number."""
STRANGER = "is no node of Penstock"

T = TypeVar("T")


class NodeLostError(ConnectionError):
    """The connection is lost, or was closed."""


class SecretError(Exception):
    """The peer has another secret, or is no node of this kind. The message says which."""


class Challenge(msgspec.Struct, frozen=True):
    """The first message: from whoever was connected to."""

    nonce: bytes
    version: str = __version__
    protocol: str = NODES


class Answer(msgspec.Struct, frozen=True):
    """The answer to a challenge, of whoever has connected."""

    nonce: bytes
    proof: bytes
    version: str = __version__


class Verdict(msgspec.Struct, frozen=True):
    """The answer to that. ``proof`` is empty where the connection is refused."""

    proof: bytes = b""


class NodeLink:
    """One end of a connection.

    Args:
        connected: socket, which is this object's from now on.

    Methods raise ``NodeLostError`` where the connection is lost.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self.limit = MAX_HANDSHAKE_BYTES
        """Maximum size of a message."""
        self.version = ""
        """Penstock's version at the other end, once authenticated."""
        self.host, self.port = connected.getpeername()[:2]

    @property
    def descriptor(self) -> int:
        """Readable when something may have arrived."""
        return self.socket.fileno()

    def send(
        self, message: bytes, channel: int = NODE, deadline: float = float("inf"), poller: Poller | None = None
    ) -> None:
        """Send a message.

        Args:
            deadline: on the monotonic clock. Raises ``TimeoutError`` where it has not been sent until then; no other
                can be sent after it.
            poller: waits until there is room; None waits for this connection alone.
        """
        left = memoryview(len(message).to_bytes(8, "little") + channel.to_bytes(4, "little", signed=True) + message)
        while left:
            try:
                left = left[self.socket.send(left) :]
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise NodeLostError(error.strerror or str(error)) from error
            if poller:
                poller.wait(deadline, self.descriptor, select.POLLOUT)
            else:
                self._wait(select.POLLOUT, deadline)

    def fetch(self) -> bool:
        """Read what has arrived, without waiting. Returns whether there was anything."""
        try:
            data = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise NodeLostError(error.strerror or str(error)) from error
        if not data:
            raise NodeLostError("it was closed")
        self._received += data
        return True

    def take(self) -> tuple[int, bytes] | None:
        """Channel and contents of the next message that was read whole; None where there is none.

        Raises ``SecretError`` for one that is too long where the peer is not authenticated yet.
        """
        if len(self._received) < HEADER:
            return None
        size = int.from_bytes(self._received[:8], "little")
        channel = int.from_bytes(self._received[8:HEADER], "little", signed=True)
        if size > self.limit and not self.version:
            raise SecretError(STRANGER)
        if size > self.limit:
            raise NodeLostError(f"it sends {size} bytes, where {self.limit} are the most")
        if len(self._received) < HEADER + size:
            return None
        message = bytes(self._received[HEADER : HEADER + size])
        del self._received[: HEADER + size]
        return channel, message

    def receive(self, deadline: float = float("inf")) -> bytes:
        """Wait for the next message of the nodes themselves. Raises ``TimeoutError``."""
        while True:
            if taken := self.take():
                return taken[1]
            self._wait(select.POLLIN, deadline)
            self.fetch()

    def _wait(self, events: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        waited = select.poll()
        waited.register(self.socket, events)
        waited.poll(min(left, MAX_POLL) * 1000)

    def keep_alive(self, timeout: float) -> None:
        """Have the kernel give the connection up where the other end's machine does not answer for about
        ``timeout`` seconds."""
        _keep_alive(self.socket, timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(timeout * 1000, 2**31 - 1)))

    def close(self) -> None:
        self.socket.close()


def keep_rank_link_alive(connected: socket.socket, timeout: float) -> None:
    """The same for a connection between ranks. Who computes a long step may leave what was sent to it unread: that is
    not given up, but left to the executor's deadlines."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(connected, timeout)


def _keep_alive(connected: socket.socket, timeout: float) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = int(min(max(1, timeout / 4), MAX_KEEPALIVE))
    for option, value in (
        (socket.TCP_KEEPIDLE, interval),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, max(1, round(min(timeout / interval, MAX_KEEPALIVE_PROBES)) - 1)),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


# --- Authentication ---------------------------------------------------------------------------------------------------
# Both prove by HMAC-SHA256 over both nonces that they know the secret (challenge–response). Whoever connects does so
# first, so that the other one tells strangers nothing.


def _proof(secret: bytes, role: bytes, challenge: Challenge, answer_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"penstock " + role + challenge.nonce + answer_nonce, "sha256")


def accept(connected: socket.socket, secret: bytes, protocol: str = NODES) -> NodeLink:
    """Authenticate whoever has connected for ``protocol``. Raises ``SecretError``, ``NodeLostError`` or
    ``TimeoutError``, and closes the connection then."""
    link, deadline = NodeLink(connected), time.monotonic() + HANDSHAKE_TIMEOUT
    try:
        challenge = send_challenge(link, protocol)
        check_answer(link, challenge, link.receive(deadline), secret)
    except BaseException:
        link.close()
        raise
    return link


def send_challenge(link: NodeLink, protocol: str) -> Challenge:
    """The first part of ``accept``; the answer is the next message. Does not wait."""
    challenge = Challenge(os.urandom(32), protocol=protocol)
    link.send(msgspec.msgpack.encode(challenge), deadline=time.monotonic())
    return challenge


def check_answer(link: NodeLink, challenge: Challenge, message: bytes, secret: bytes) -> None:
    """The second part of ``accept``, with the answer. Does not wait. Raises ``SecretError``."""
    answer = _decode(message, Answer)
    known = hmac.compare_digest(answer.proof, _proof(secret, b"connects", challenge, answer.nonce))
    proof = _proof(secret, b"listens", challenge, answer.nonce) if known and len(answer.nonce) == 32 else b""
    link.send(msgspec.msgpack.encode(Verdict(proof)), deadline=time.monotonic())
    if not proof:
        raise SecretError("has another cluster secret")
    link.limit, link.version = MAX_NODE_MESSAGE, answer.version


def connect(
    address: tuple[str, int], secret: bytes, protocol: str = NODES, timeout: float = HANDSHAKE_TIMEOUT
) -> NodeLink:
    """Connect, and authenticate both ends.

    Raises ``SecretError``, and ``OSError`` (``NodeLostError`` and ``TimeoutError`` are) where nobody answers.
    """
    deadline = time.monotonic() + timeout
    link = NodeLink(socket.create_connection(address, timeout))
    try:
        challenge = _decode(link.receive(deadline), Challenge)
        if challenge.protocol != protocol:
            words = (
                f"runs Penstock {challenge.version}, and this node {__version__}: install the same version on all nodes"
            )
            raise SecretError(words)
        nonce = os.urandom(32)
        answer = Answer(nonce, _proof(secret, b"connects", challenge, nonce))
        link.send(msgspec.msgpack.encode(answer), deadline=deadline)
        verdict = _decode(link.receive(deadline), Verdict)
        if not hmac.compare_digest(verdict.proof, _proof(secret, b"listens", challenge, nonce)):
            raise SecretError("has another cluster secret: copy the file of the first node to this one")
    except BaseException:
        link.close()
        raise
    link.limit, link.version = MAX_NODE_MESSAGE, challenge.version
    return link


def _decode(message: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SecretError(STRANGER) from error
