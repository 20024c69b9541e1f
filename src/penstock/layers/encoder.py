"""Bidirectional attention of encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.ops import AttentionOptions, Batch, KVSpec
from penstock.parallel import shard_heads, shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear


class BidirectionalAttention:
    """Attention of every token to all tokens of its sequence. A sequence is computed in one step.

    Keys and values go through the KV cache, so that encoders use the kernels of decoders. Nothing reads them after the
    layer, so all layers of a model share one KV cache.

    Args:
        name: module in the checkpoint with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``.
        rope: ``[max_len, head_dim]`` from ``BuildContext.rope_table``; None: no rotary embedding.
        window: number of positions that a query sees on either side, including its own; 0: all.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        rope: Tensor | None = None,
        window: int = 0,
        bias: bool = True,
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._rope = rope
        self._head_dim = head_dim
        self._options = AttentionOptions(head_dim**-0.5, window, causal=False)
        self._heads = shard = shard_heads(context.group, num_heads, num_heads)[0] * head_dim
        # Attention needs contiguous queries. Rotary embedding copies them; else a separate product computes them.
        products = ["qkv"] if rope is not None else ["q", "kv"]
        self._products = [
            ColumnParallelLinear(
                context, [f"{name}.{part}_proj" for part in parts], hidden_size, [shard] * len(parts), bias
            )
            for parts in products
        ]
        shards = [shard_outputs(context.group, hidden_size)]
        self._output = ColumnParallelLinear(context, [f"{name}.o_proj"], hidden_size, shards, bias, gather_output=True)

    def kv_spec(self, block_size: int) -> KVSpec:
        """Shape of the KV cache that the layers of a model share."""
        dtype = str(self._dtype).removeprefix("torch.")
        return KVSpec(self._heads.size // self._head_dim, self._head_dim, dtype, block_size)

    def __call__(self, x: Tensor, cache: Any, batch: Batch, logits_only: bool) -> Tensor:
        """Compute attention, ``[tokens, hidden]`` to ``[tokens, hidden]``; with ``logits_only`` only the rows
        ``batch.logits_indices``, ``[rows, hidden]``."""
        parts = [part for product in self._products for part in self._split(product(x))]
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in parts)
        if self._rope is None:
            self._ops.store_kv(cache, k, v, batch.slot_mapping)
        else:
            q = self._ops.rope_and_store(q, k, v, batch.positions, self._rope, cache, batch.slot_mapping)
        attended = self._group.all_gather(
            lambda out: self._ops.attention(q, cache, batch.attention, self._options, out),
            q.shape[0],
            self._heads,
            self._dtype,
        )
        if logits_only:
            attended = self._ops.index_select(attended, batch.logits_indices)
        return self._output(attended)

    def _split(self, product: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = product.split(self._heads.size, -1)
        return parts
