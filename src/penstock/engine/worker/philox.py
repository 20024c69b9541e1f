"""Philox4x32-10, a counter-based random number generator (Salmon et al., 2011).

The key is the request's seed; the counter consists of position, sequence and stream. So the random numbers of a request
do not depend on the batch, and do not change if a token is recomputed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
ROUNDS = 10
MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64) * np.arange(ROUNDS, dtype=np.uint64)[:, None, None]
"""Numbers added to the key in each round, ``[ROUNDS, 2, 1]``."""


def philox(key: NDArray[np.uint32], counter: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Random bits, ``[draws, 4]`` uint32, for each pair of key and counter.

    Args:
        key: ``[draws, 2]`` uint32.
        counter: ``[draws, 4]`` uint32.
    """
    state = counter.T.astype(np.uint64)
    even, odd = state[0::2], state[1::2]
    for round_key in (key.T + WEYL) & LOW:
        products = even * MULTIPLIERS
        even, odd = (products >> HALF)[::-1] ^ odd ^ round_key, (products & LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]), 1).astype(np.uint32)


def uniform(
    seeds: NDArray[np.uint64], positions: NDArray[np.uint32], sequences: NDArray[np.uint32], stream: int = 0
) -> NDArray[np.float64]:
    """Uniform random numbers in [0, 1) of 53 random bits each, ``[draws]``.

    Args:
        seeds: seed of the request of each draw, ``[draws]``.
        positions: position of the sampled token in its sequence, ``[draws]``.
        sequences: index of the sequence in its request, ``[draws]``.
        stream: number of an independent stream, for several random numbers at the same position.
    """
    key = np.stack((seeds & LOW, seeds >> HALF), 1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = positions, sequences, stream
    bits = philox(key, counter)
    return ((bits[:, 0] >> 5) * 2.0**26 + (bits[:, 1] >> 6)) * 2.0**-53
