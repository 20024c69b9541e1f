"""Sums over the KV cache: what it is asked to hold, in blocks."""

from __future__ import annotations

import math


def blocks_of_sequences(sequences: float, longest: int, block_size: int) -> int:
    """Blocks for so many sequences of the longest length, as PaddleNLP's ``BLOCK_BS`` counts them."""
    return int(sequences * math.ceil(longest / block_size))
