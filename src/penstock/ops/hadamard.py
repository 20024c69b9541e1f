"""Walsh-Hadamard transforms of blocks of inputs, which reduce the error of low-bit quantization.

A transform spreads outliers over their block (QuaRot, Ashkboos et al., 2024). Products do not change if both weights
and activations are transformed, and the weights divided by the block size ``n``: ``H @ H`` is ``n`` times the identity.
"""

from __future__ import annotations

from torch import Tensor


def hadamard(x: Tensor, block: int) -> Tensor:
    """Multiply blocks of the last dimension by the unnormalized Hadamard matrix (entries 1 and -1).

    The additions have strides 1, 2, 4, … in this order, so that all backends give the same bits.

    Args:
        x: ``[..., size]`` float32.
        block: block size, a power of two that divides ``size``; 1 returns ``x``.
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
