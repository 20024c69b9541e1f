"""Signatures of HTTP requests between a router and its instances, which share a cluster secret."""

from __future__ import annotations

import hmac
import time

from penstock.core import Code, PenstockError

HEADER = "x-penstock-signature"
WINDOW = 300.0
"""Maximum clock difference of two hosts in seconds. A request replayed within this time is harmless: the router
registers the named instance if it is running, and otherwise cannot reach it."""


def sign(secret: bytes, path: str, body: bytes) -> str:
    """Value of ``HEADER`` for a request sent now."""
    now = str(int(time.time()))
    return f"{now}:{_digest(secret, path, body, now)}"


def verify(secret: bytes, path: str, body: bytes, signature: str) -> None:
    """Raise ``PenstockError`` (``unauthorized``) unless the request was signed with the secret, within ``WINDOW``."""
    signed, _, digest = signature.partition(":")
    if not hmac.compare_digest(digest.encode(), _digest(secret, path, body, signed).encode()):
        message = "the request must be signed with the secret of this cluster (--cluster-secret-file)"
        raise PenstockError(Code.UNAUTHORIZED, message)
    if abs(time.time() - int(signed)) > WINDOW:
        message = f"the clocks of both hosts differ by more than {WINDOW:.0f} seconds: synchronize them"
        raise PenstockError(Code.UNAUTHORIZED, message)


def _digest(secret: bytes, path: str, body: bytes, signed: str) -> str:
    return hmac.new(
        secret, b"\0".join((b"penstock request", path.encode(), signed.encode(), body)), "sha256"
    ).hexdigest()
