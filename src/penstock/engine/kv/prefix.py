"""Names of prefixes: a block_hashes of hashes, one for each full block, so that equal prefixes find equal blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
"""128 bits: two prefixes that meet would hand one user's cache to another."""


def root(weights: str, adapter: str = "", salt: str = "") -> bytes:
    """The block_hashes's start, which keeps apart whatever changes keys and values besides the tokens."""
    block_hashes = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (weights, adapter, salt):
        encoded = part.encode()
        block_hashes.update(len(encoded).to_bytes(8, "little") + encoded)
    return block_hashes.digest()


def extend(block_hashes: list[bytes], start: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to ``block_hashes`` the names of those full blocks of ``tokens`` that it lacks.

    Args:
        block_hashes: names so far, the i-th of the first ``(i + 1) * block_size`` tokens.
        start: the block_hashes's ``root``.
    """
    for begin in range(len(block_hashes) * block_size, len(tokens) // block_size * block_size, block_size):
        block = array("I", tokens[begin : begin + block_size]).tobytes()
        block_hashes.append(
            hashlib.blake2b(block, key=block_hashes[-1] if block_hashes else start, digest_size=HASH_BYTES).digest()
        )
