"""Ops of state space models (Mamba 2), token by token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import Batch
from ..states import StateSpaceSizes
from .states import Parts, scan_sequences


def state_space(
    xbc: Tensor,
    steps: Tensor,
    log_decay: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    sizes: StateSpaceSizes,
    cache: Mapping[str, Tensor],
    batch: Batch,
    out: Tensor | None = None,
) -> Tensor:
    """State space model with a scalar decay per head (Mamba 2; Dao and Gu, 2024). For each head, with the state S,
    ``[state_size, head_dim]`` float32::

        t = clamp(softplus(step + step_bias), min_step, max_step)
        S = exp(-exp(log_decay) * t) * S + B (t * x)^T
        output = S^T C + skip * x

    Args:
        xbc: ``[tokens, channels]``: x of all heads, then B and C of all groups. A group serves consecutive heads.
        steps: ``[tokens, heads]``.
        log_decay, step_bias, skip: ``[heads]`` float32.
        cache: ``state``: ``[slots, heads, state_size, head_dim]`` float32; ``xbc`` and ``steps``.
        out: destination of the result.

    Returns ``[tokens, heads * head_dim]``.
    """
    values, keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.state_size

    def by_head(part: Tensor) -> Tensor:
        part = part.unflatten(-1, (sizes.groups, sizes.state_size))
        return part.repeat_interleave(sizes.heads // sizes.groups, 1)

    def scan(state: Parts, inputs: Parts) -> Tensor:
        given, matrix = inputs["xbc"].float(), state["state"]
        x = given[:, :values].unflatten(-1, (sizes.heads, sizes.head_dim))
        b, c = by_head(given[:, values : values + keys]), by_head(given[:, values + keys :])
        step = F.softplus(inputs["steps"].float() + step_bias).clamp(sizes.min_step, sizes.max_step)
        decay, changes = torch.exp(-log_decay.exp() * step), x * step[:, :, None]
        outputs = []
        for b_t, c_t, change, decay_t in zip(b, c, changes, decay, strict=True):
            matrix *= decay_t[:, None, None]
            matrix += b_t[:, :, None] * change[:, None, :]
            outputs.append((matrix * c_t[:, :, None]).sum(1))
        summed: Tensor = torch.stack(outputs) + skip[:, None] * x
        return summed.flatten(1).to(xbc.dtype)

    names = ("state", "xbc", "steps")
    result = scan_sequences(scan, {name: cache[name] for name in names}, {"xbc": xbc, "steps": steps}, batch)
    return result if out is None else out.copy_(result)


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    """The rows of ``[tokens, a]``, each followed by a row of ``[tokens, b]``. Returns ``[tokens, a + b]``."""
    return torch.cat((x, y), -1)
