"""Signatures of HTTP requests between a router and its instances, which know the same cluster secret."""

from __future__ import annotations

import hmac
import time

from penstock.core import Code, PenstockError

HEADER = "x-penstock-signature"
WINDOW = 300.0
"""Seconds by which the clocks of two hosts may differ. A request that is sent again within them changes nothing: the
instance that it names is there, or it does not answer."""


def sign(secret: bytes, path: str, body: bytes) -> str:
    """The value of ``HEADER`` for a request that is sent now."""
    now = str(int(time.time()))
    return f"{now}:{_digest(secret, path, body, now)}"


def verify(secret: bytes, path: str, body: bytes, signature: str) -> None:
    """Raises ``PenstockError`` (``unauthorized``) where a request was not signed with the secret, or long ago."""
    signed, _, digest = signature.partition(":")
    if not hmac.compare_digest(digest.encode(), _digest(secret, path, body, signed).encode()):
        words = "only instances of this cluster may ask this, which know its secret (--cluster-secret-file)"
        raise PenstockError(Code.UNAUTHORIZED, words)
    if abs(time.time() - int(signed)) > WINDOW:
        words = f"the clocks of both hosts differ by more than {WINDOW:.0f} seconds"
        raise PenstockError(Code.UNAUTHORIZED, words)


def _digest(secret: bytes, path: str, body: bytes, signed: str) -> str:
    return hmac.new(
        secret, b"\0".join((b"penstock request", path.encode(), signed.encode(), body)), "sha256"
    ).hexdigest()
