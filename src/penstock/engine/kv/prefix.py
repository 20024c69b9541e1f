"""Names of prefixes: a chain of hashes, one for each full block, so that equal prefixes find equal blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
"""128 bits: two prefixes that meet would hand one user's cache to another."""


def root(weights: str, adapter: str = "", salt: str = "") -> bytes:
    """The chain's start, which keeps apart whatever changes keys and values besides the tokens."""
    chain = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (weights, adapter, salt):
        encoded = part.encode()
        chain.update(len(encoded).to_bytes(8, "little") + encoded)
    return chain.digest()


def extend(chain: list[bytes], start: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to ``chain`` the names of those full blocks of ``tokens`` that it lacks.

    Args:
        chain: names so far, the i-th of the first ``(i + 1) * block_size`` tokens.
        start: the chain's ``root``.
    """
    for begin in range(len(chain) * block_size, len(tokens) // block_size * block_size, block_size):
        block = array("I", tokens[begin : begin + block_size]).tobytes()
        chain.append(hashlib.blake2b(block, key=chain[-1] if chain else start, digest_size=HASH_BYTES).digest())
