"""Hashes of prefixes: a chain of them, one for each full block, under which equal prefixes find equal blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
"""128 bits: a collision would show one user another's keys and values."""


def root(weights: str, adapter: str = "", salt: str = "") -> bytes:
    """The seed of the chain, ``[HASH_BYTES]``: of all that changes keys and values besides the tokens."""
    seed = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (weights, adapter, salt):
        encoded = part.encode()
        seed.update(len(encoded).to_bytes(8, "little") + encoded)
    return seed.digest()


def extend(block_hashes: list[bytes], start: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to ``block_hashes`` the hashes of those full blocks of ``tokens`` that it lacks.

    Args:
        block_hashes: so far, the i-th of the first ``(i + 1) * block_size`` tokens.
        start: the seed of the chain (``root``).
    """
    for begin in range(len(block_hashes) * block_size, len(tokens) // block_size * block_size, block_size):
        block = array("I", tokens[begin : begin + block_size]).tobytes()
        block_hashes.append(
            hashlib.blake2b(block, key=block_hashes[-1] if block_hashes else start, digest_size=HASH_BYTES).digest()
        )
