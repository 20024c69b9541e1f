"""An authenticated TCP connection between two nodes, with messages of any length in both directions. Not encrypted.

Routers and engines use ZeroMQ with CURVE instead. Nodes do not: ZeroMQ cannot share the listener that sockets of ranks
and of KV transfers need, so node 0 would need a second port; a ``ROUTER`` socket does not report which peer is lost;
and ZeroMQ's limit on message sizes is the same before and after authentication.
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
"""Maximum duration of the authentication, seconds."""
MAX_HANDSHAKE_BYTES = 1024
"""Maximum size of a message before the peer is authenticated, bytes."""
MAX_NODE_MESSAGE = 2**20
"""Maximum size of a message between nodes, bytes. Messages relayed for workers may be larger."""
HEADER = 12
"""Size of a message's header, bytes: length (8, little-endian) and channel (4, little-endian, signed)."""
NODE, ALL_RANKS = -1, -2
"""Channels of messages that concern the node itself, and of messages to all its ranks. The channel of a single rank is
its world rank."""
RECEIVE_BYTES = 2**20
NODES = "penstock nodes 1"
"""Protocol name of the connections between nodes (``Challenge.protocol``)."""
DEFAULT_TIMEOUT = 60.0
"""Timeout of connections if ``engine_iteration_timeout`` is 0, seconds."""

MAX_KEEPALIVE, MAX_KEEPALIVE_PROBES = 32767, 127
"""The kernel's maximum seconds between two keepalive probes, and maximum number of probes."""
NOT_A_NODE = "is not a Penstock node"

T = TypeVar("T")


class NodeLostError(ConnectionError):
    """The connection to the other node is lost, or was closed by either end."""


class SecretError(Exception):
    """The peer has another secret, or does not speak this protocol. The message is a verb phrase about the peer, such
    as "has another cluster secret"."""


class Challenge(msgspec.Struct, frozen=True):
    """The first message of the handshake, sent by the listening end."""

    nonce: bytes
    version: str = __version__
    protocol: str = NODES


class Answer(msgspec.Struct, frozen=True):
    """The answer to a ``Challenge``, sent by the connecting end."""

    nonce: bytes
    proof: bytes
    version: str = __version__


class Verdict(msgspec.Struct, frozen=True):
    """The reply to an ``Answer``, sent by the listening end. ``proof`` is empty if the connection is refused."""

    proof: bytes = b""


class NodeLink:
    """One end of a connection. Methods raise ``NodeLostError`` if the connection is lost.

    Args:
        connected: connected socket. This object takes ownership of it.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self.limit = MAX_HANDSHAKE_BYTES
        """Maximum size of a received message, bytes."""
        self.version = ""
        """Penstock's version at the other end; empty until it is authenticated."""
        self.host, self.port = connected.getpeername()[:2]

    @property
    def descriptor(self) -> int:
        """File descriptor that is readable when data may have arrived."""
        return self.socket.fileno()

    def send(
        self, message: bytes, channel: int = NODE, deadline: float = float("inf"), poller: Poller | None = None
    ) -> None:
        """Send a message.

        Args:
            deadline: time (monotonic clock) by which it must be sent. Otherwise raises ``TimeoutError``, and no other
                message can be sent after that.
            poller: used to wait for room in the socket's buffer; None: wait for this connection alone.
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
        """Read arrived data into the receive buffer, without waiting. Returns True if data was read."""
        try:
            data = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise NodeLostError(error.strerror or str(error)) from error
        if not data:
            raise NodeLostError("connection closed by the peer")
        self._received += data
        return True

    def take(self) -> tuple[int, bytes] | None:
        """Channel and contents of the next complete message; None if none is complete.

        Raises ``SecretError`` if the message exceeds ``limit`` and the peer is not authenticated yet.
        """
        if len(self._received) < HEADER:
            return None
        size = int.from_bytes(self._received[:8], "little")
        channel = int.from_bytes(self._received[8:HEADER], "little", signed=True)
        if size > self.limit and not self.version:
            raise SecretError(NOT_A_NODE)
        if size > self.limit:
            raise NodeLostError(f"the peer sent a message of {size} bytes, more than the limit of {self.limit}")
        if len(self._received) < HEADER + size:
            return None
        message = bytes(self._received[HEADER : HEADER + size])
        del self._received[: HEADER + size]
        return channel, message

    def receive(self, deadline: float = float("inf")) -> bytes:
        """Wait for the next message on any channel. Raises ``TimeoutError`` at the deadline (monotonic clock)."""
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
        """Make the kernel drop the connection if the peer's machine does not answer for about ``timeout`` seconds."""
        _keep_alive(self.socket, timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(timeout * 1000, 2**31 - 1)))

    def close(self) -> None:
        self.socket.close()


def keep_rank_link_alive(connected: socket.socket, timeout: float) -> None:
    """Enable TCP keepalive on a connection between ranks. Unlike with ``NodeLink.keep_alive``, sent data may remain
    unread without limit, as a rank in a long step does not read; the executor's deadlines apply instead."""
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
# Both ends prove with an HMAC-SHA256 of both nonces that they know the secret (challenge–response). The connecting end
# proves it first, so that the listening end discloses nothing to strangers.


def _proof(secret: bytes, role: bytes, challenge: Challenge, answer_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"penstock " + role + challenge.nonce + answer_nonce, "sha256")


def accept(connected: socket.socket, secret: bytes, protocol: str = NODES) -> NodeLink:
    """Authenticate the peer of an accepted connection. After a failure, close the connection and raise
    ``SecretError``, ``NodeLostError`` or ``TimeoutError``."""
    link, deadline = NodeLink(connected), time.monotonic() + HANDSHAKE_TIMEOUT
    try:
        challenge = send_challenge(link, protocol)
        check_answer(link, challenge, link.receive(deadline), secret)
    except BaseException:
        link.close()
        raise
    return link


def send_challenge(link: NodeLink, protocol: str) -> Challenge:
    """First part of ``accept``: send the challenge, without waiting for the answer."""
    challenge = Challenge(os.urandom(32), protocol=protocol)
    link.send(msgspec.msgpack.encode(challenge), deadline=time.monotonic())
    return challenge


def check_answer(link: NodeLink, challenge: Challenge, message: bytes, secret: bytes) -> None:
    """Second part of ``accept``: check the encoded answer, and send the verdict. Raises ``SecretError``."""
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

    Raises ``SecretError``, and ``OSError`` (``NodeLostError``, ``TimeoutError`` and others) if the peer does not
    answer.
    """
    deadline = time.monotonic() + timeout
    link = NodeLink(socket.create_connection(address, timeout))
    try:
        challenge = _decode(link.receive(deadline), Challenge)
        if challenge.protocol != protocol:
            versions = f"runs Penstock {challenge.version}, and this node {__version__}"
            raise SecretError(f"{versions}: install the same version on all nodes")
        nonce = os.urandom(32)
        answer = Answer(nonce, _proof(secret, b"connects", challenge, nonce))
        link.send(msgspec.msgpack.encode(answer), deadline=deadline)
        verdict = _decode(link.receive(deadline), Verdict)
        if not hmac.compare_digest(verdict.proof, _proof(secret, b"listens", challenge, nonce)):
            raise SecretError("has another cluster secret: copy the file of node 0 to this node")
    except BaseException:
        link.close()
        raise
    link.limit, link.version = MAX_NODE_MESSAGE, challenge.version
    return link


def _decode(message: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SecretError(NOT_A_NODE) from error
