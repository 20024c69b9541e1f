"""Walsh-Hadamard transforms of blocks of inputs, which reduce the error of rounding to few bits.

A transform spreads a block's largest value over the whole block (QuaRot, Ashkboos et al., 2024). Transformed weights,
divided by the block's length ``n``, have the same products with transformed activations, as ``H @ H`` is ``n`` times
the identity.
"""

from __future__ import annotations

from torch import Tensor


def hadamard(x: Tensor, block: int) -> Tensor:
    """Multiply blocks of the last dimension by the Hadamard matrix of 1 and -1, which is not normalized.

    Butterflies are float32 additions from neighbours to the halves of a block, so that every backend gets the same
    bits.

    Args:
        x: ``[..., size]`` float32.
        block: inputs of a block, a power of two that divides ``size``; 1 returns ``x``.
    """
    half = 1
    while half < block:
        pairs = x.unflatten(-1, (-1, 2, half))
        even, odd = pairs[..., 0, :], pairs[..., 1, :]
        x = pairs.new_empty(pairs.shape)
        x[..., 0, :], x[..., 1, :] = even + odd, even - odd
        x = x.flatten(-3)
        half *= 2
    return x
