"""Encryption of the connections between routers and engines: ZeroMQ's CURVE, with keys derived from the cluster
secret."""

from __future__ import annotations

import hmac

import zmq
from zmq.utils import z85

from penstock.core import Code, PenstockError

MAX_FRAME = 2**20
"""Maximum size of a frame to an engine, bytes. Limits memory, as ZeroMQ reads a whole frame before authentication."""
OVERHEAD = 2**10
"""Maximum number of bytes that encryption adds to a frame."""


def secure_server(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Accept only clients that know the secret. Call this before the socket is bound. Raises ``PenstockError``
    (``unsupported``) if ZeroMQ lacks CURVE."""
    public, private = _engine_keys(secret)
    socket.curve_server = True
    socket.maxmsgsize = MAX_FRAME + OVERHEAD
    socket.curve_publickey, socket.curve_secretkey = public, private


def secure_client(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Connect only to an engine that knows the secret. Raises ``PenstockError`` (``unsupported``) if ZeroMQ lacks
    CURVE."""
    socket.curve_serverkey = _engine_keys(secret)[0]
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def frames(message: bytes) -> list[memoryview]:
    """Split a message to an engine into frames of at most ``MAX_FRAME`` bytes."""
    view = memoryview(message)
    return [view[first : first + MAX_FRAME] for first in range(0, len(view), MAX_FRAME)]


def _engine_keys(secret: bytes) -> tuple[bytes, bytes]:
    """Public and private key of all engines of a cluster.

    The public key is also secret: it is derived from the cluster secret, and CURVE never sends it. A client's first
    message is valid only if it was encrypted with the public key, so only clients that know the cluster secret are
    accepted. Client keys need not be authenticated.
    """
    if not zmq.has("curve"):
        message = "the installed ZeroMQ library has no CURVE encryption, which connections between hosts need: install "
        raise PenstockError(Code.UNSUPPORTED, message + "pyzmq from its wheel", "engine_address")
    private = z85.encode(hmac.digest(secret, b"penstock engine's CURVE key", "sha256"))
    return zmq.curve_public(private), private
