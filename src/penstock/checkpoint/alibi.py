"""Slopes of ALiBi (Press et al., 2022), as float32 numbers."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slope of each head: a geometric sequence, from ``2 ** (-8 / n)`` to ``2 ** -8`` for ``n`` heads. If ``n`` is no
    power of two, the remaining heads have every second slope of the next power of two."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = _geometric(power)
    return (slopes + _geometric(2 * power)[::2])[:num_heads]


def mpt_alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes of MPT: those of the next power of two, first every second one from the second on, then the others."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = _geometric(power)
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def _geometric(count: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8 * number / count) for number in range(1, count + 1))
