"""Several residual streams: hyper-connections (DeepSeek-V4), and AltUp (Gemma 3n)."""

from __future__ import annotations

import torch
from torch import Tensor


def hyper_weights(logits: Tensor, base: Tensor, scale: Tensor, streams: int, iterations: int, eps: float) -> Tensor:
    """Weights of hyper-connections (Xie et al., 2026), from their logits.

    Args:
        logits: ``[tokens, (2 + streams) * streams]`` float32: to collapse the streams, to expand the output of a layer,
            and to mix the streams, ``[in, out]``; or only the first, ``[tokens, streams]``.
        base: added to the logits after the multiplication by the scale, float32.
        scale: ``[3]`` float32, one for each kind of logits; ``[1]`` if there is one kind.
        iterations: number of iterations of Sinkhorn's algorithm, after which rows and columns of the last sum to 1.

    Returns weights in the order of ``logits``.
    """
    n = streams
    sizes = [n, n, n * n] if logits.shape[1] > n else [n]
    parts = [
        part * factor + added
        for part, factor, added in zip(logits.split(sizes, -1), scale, base.split(sizes), strict=True)
    ]
    collapse: Tensor = parts[0].sigmoid() + eps
    if len(parts) == 1:
        return collapse
    mix: Tensor = parts[2].unflatten(-1, (n, n)).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return torch.cat((collapse, 2 * parts[1].sigmoid(), mix.flatten(-2)), -1)


def collapse_streams(x: Tensor, weights: Tensor, streams: int) -> Tensor:
    """Weighted sum of residual streams: ``[tokens, streams * hidden]`` to ``[tokens, hidden]``.

    Args:
        weights: ``[tokens, streams or more]`` float32, such as the result of ``hyper_weights``; ``[1, ...]``: the same
            for all tokens.
    """
    total: Tensor = (x.float().unflatten(-1, (streams, -1)) * weights[:, :streams, None]).sum(1)
    return total.to(x.dtype)


def mix_streams(x: Tensor, residual: Tensor, weights: Tensor, streams: int) -> Tensor:
    """Mix residual streams, ``[tokens, streams * hidden]``, and add the weighted output of a layer to each.

    A backend may change ``residual`` in place.

    Args:
        x: ``[tokens, hidden]``.
        weights: ``[tokens, (2 + streams) * streams]`` float32, in the order of ``hyper_weights``, of which the first
            ``streams`` are not used; ``[1, ...]``: the same for all tokens.
    """
    expand, mix = weights[:, streams:].split([streams, streams * streams], -1)
    mixed = mix.unflatten(-1, (streams, streams)).transpose(1, 2) @ residual.float().unflatten(-1, (streams, -1))
    total: Tensor = expand[:, :, None] * x.float()[:, None] + mixed
    return total.flatten(1).to(x.dtype)


def equalize_streams(x: Tensor, streams: int, min_square: float) -> Tensor:
    """Scale residual streams so that each has the root mean square of the first: ``[tokens, streams * hidden]``.

    A backend may change ``x`` in place.

    Args:
        min_square: replaces smaller mean squares, as divisor.
    """
    parts = x.float().unflatten(-1, (streams, -1))
    squares = parts.pow(2).mean(-1, keepdim=True)
    scaled: Tensor = parts * (squares[:, :1].sqrt() / squares.clamp(min=min_square).sqrt())
    return torch.cat((parts[:, :1], scaled[:, 1:]), 1).flatten(1).to(x.dtype)
