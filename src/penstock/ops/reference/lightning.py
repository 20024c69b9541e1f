"""Lightning attention: linear attention with a constant decay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch import Batch
from .matrix import write
from .states import Parts, scan_sequences


def lightning_attention(
    qkv: Tensor, decay: Tensor, cache: Mapping[str, Tensor], batch: Batch, out: Tensor | None = None
) -> Tensor:
    """Linear attention with a constant decay per head (Qin et al., 2024, "Lightning Attention-2"). For each head, with
    query q, key k, value v and the state S, ``[dim, dim]`` float32::

        S = decay * S + k v^T
        output = S^T q

    Args:
        qkv: ``[tokens, 3 * heads * dim]``: all queries, then all keys, then all values.
        decay: ``[heads]`` float32.
        cache: ``state``: ``[slots, heads, dim, dim]`` float32; ``qkv``.
        out: destination of the result.

    Returns ``[tokens, heads * dim]``.
    """
    heads = len(decay)

    def scan(state: Parts, inputs: Parts) -> Tensor:
        matrix, outputs = state["state"], []
        for q, k, v in inputs["qkv"].float().unflatten(-1, (3, heads, -1)):
            matrix *= decay[:, None, None]
            matrix += k[:, :, None] * v[:, None, :]
            outputs.append((matrix * q[:, :, None]).sum(1))
        return torch.stack(outputs).flatten(1).to(qkv.dtype)

    result = scan_sequences(scan, {name: cache[name] for name in ("state", "qkv")}, {"qkv": qkv}, batch)
    return write(result, out)
