"""Encryption of the connections between routers and engines, by CURVE with keys that the cluster secret gives."""

from __future__ import annotations

import hmac

import zmq
from zmq.utils import z85

from penstock.core import Code, PenstockError

MAX_FRAME = 2**20
"""Bytes of a frame to an engine. ZeroMQ reads a whole frame before it knows whether its sender has the secret."""
OVERHEAD = 2**10
"""Bytes that encryption may add to a frame."""


def secure_server(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Accept only clients that know the secret, before the socket is bound. Raises ``PenstockError`` as
    ``secure_client``."""
    public, private = _engine_keys(secret)
    socket.curve_server = True
    socket.maxmsgsize = MAX_FRAME + OVERHEAD
    socket.curve_publickey, socket.curve_secretkey = public, private


def secure_client(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Connect only to an engine that knows the secret. Raises ``PenstockError`` (``unsupported``) where ZeroMQ has no
    CURVE."""
    socket.curve_serverkey = _engine_keys(secret)[0]
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def frames(message: bytes) -> list[memoryview]:
    """A message to an engine as frames that it reads."""
    view = memoryview(message)
    return [view[first : first + MAX_FRAME] for first in range(0, len(view), MAX_FRAME)]


def _engine_keys(secret: bytes) -> tuple[bytes, bytes]:
    """Public and private key of all engines of a cluster.

    The public one is no less secret than the other: it is made of the cluster secret, and CURVE never sends it. A
    client's first message can be opened only if it was made with that key, so whoever gets further knows the secret,
    and clients need no keys of their own by which engines would know them.
    """
    if not zmq.has("curve"):
        words = "the ZeroMQ library of this installation has no CURVE, which connections between hosts need: "
        raise PenstockError(Code.UNSUPPORTED, words + "install pyzmq from its wheel", "engine_address")
    private = z85.encode(hmac.digest(secret, b"penstock engine's CURVE key", "sha256"))
    return zmq.curve_public(private), private
