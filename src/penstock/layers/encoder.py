"""Attention in both directions, and feed-forward layers as encoders have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.ops import Batch, KVSpec
from penstock.parallel import Shard, shard_heads, shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear


class BidirectionalAttention:
    """Attention of every token over all tokens of its sequence, which one step computes.

    Keys and values pass through the KV cache, so that the kernels of decoders serve encoders, too. Nothing reads them
    after the layer: all layers of a model share one entry of the cache.

    Args:
        qkv: names of the checkpoint's matrices of queries, keys and values; the same name three times for one matrix
            of all three.
        output: name of the output projection.
        rope: ``[max_len, head_dim]``, of ``BuildContext.rope_table``; None without rotary positions.
        window: positions that a query sees on either side, its own included; 0 is all.
    """

    def __init__(
        self,
        context: BuildContext,
        qkv: Sequence[str],
        output: str,
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
        self._window = window
        self._heads = shard = shard_heads(context.group, num_heads, num_heads)[0] * head_dim
        shards = [shard] * 3
        if qkv[0] == qkv[1]:
            shards = [part_of(shard, number, 3) for number in range(3)]
        # Attention wants queries contiguous: where no rope copies them, they are a product of their own.
        cuts = [3] if rope is not None else [1, 2]
        self._products: list[ColumnParallelLinear] = []
        for count in cuts:
            first = len(self._products)
            names = list(qkv[first : first + count])
            self._products.append(
                ColumnParallelLinear(context, names, hidden_size, shards[first : first + count], bias)
            )
        self._output = ColumnParallelLinear(
            context, [output], hidden_size, [shard_outputs(context.group, hidden_size)], bias, gather_output=True
        )

    def kv_spec(self, block_size: int) -> KVSpec:
        """The entry of the KV cache that the layers of a model share."""
        dtype = str(self._dtype).removeprefix("torch.")
        return KVSpec(self._heads.size // self._head_dim, self._head_dim, dtype, block_size)

    def __call__(self, x: Tensor, cache: Any, batch: Batch, logits_only: bool) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``, or to ``[rows, hidden]`` with ``logits_only``, of
        ``batch.logits_indices``."""
        parts = [part for product in self._products for part in self._split(product(x))]
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in parts)
        if self._rope is None:
            self._ops.store_kv(cache, k, v, batch.slot_mapping)
        else:
            q = self._ops.rope_and_store(q, k, v, batch.positions, self._rope, cache, batch.slot_mapping)
        attended = self._group.all_gather(
            lambda out: self._ops.attention(
                q, cache, batch.attention, self._head_dim**-0.5, self._window, out, causal=False
            ),
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


class EncoderMLP:
    """Two matrices with an activation function between them, or, gated, ``down(function(gate(x)) * up(x))``.

    Args:
        up: names of the matrix before the function, or of gate and up; the same name twice for one matrix of both.
        down: name of the matrix after it.
        function: a name of ``ops.encoder_ops.FUNCTIONS``.
        bias: whether the matrices of ``up`` have biases, and whether ``down`` has one.
        gate_last: whether a matrix of both has the gate behind the other.
    """

    def __init__(
        self,
        context: BuildContext,
        up: Sequence[str],
        down: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        function: str,
        bias: tuple[bool, bool] = (True, True),
        gate_last: bool = False,
    ) -> None:
        ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._function = function
        self._shard = shard = shard_outputs(context.group, intermediate_size)
        shards = [shard] * len(up)
        if len(up) == 2 and up[0] == up[1]:
            shards = [part_of(shard, number, 2) for number in ((1, 0) if gate_last else (0, 1))]
        self._activation = ops.activation if len(up) == 1 else ops.activation_and_mul
        self._up = ColumnParallelLinear(context, list(up), hidden_size, shards, bias[0])
        self._down = ColumnParallelLinear(
            context,
            [down],
            intermediate_size,
            [shard_outputs(context.group, hidden_size)],
            bias[1],
            gather_output=True,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``."""
        activations = self._group.all_gather(
            lambda out: self._activation(self._up(x), self._function, out), x.shape[0], self._shard, self._dtype
        )
        return self._down(activations)


def part_of(shard: Shard, number: int, parts: int) -> Shard:
    """A rank's outputs of one of several equal parts that a single matrix has one after the other."""
    before = number * shard.total
    return Shard(before + shard.first, before + shard.end, parts * shard.total)
