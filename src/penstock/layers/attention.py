"""Attention layers."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from penstock.ops import Batch, KVSpec, LayerExport, QKNorms
from penstock.parallel import shard_heads, shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear


class AttentionLayer(Protocol):
    """The interface of attention layers."""

    def kv_spec(self, block_size: int, quantization: str) -> KVSpec:
        """This layer's entry of the KV cache."""
        ...

    def __call__(
        self, x: Tensor, cache: Any, batch: Batch, logits_only: bool, export: LayerExport | None = None
    ) -> Tensor:
        """Store the keys and values of all tokens, and attend.

        Args:
            x: ``[tokens, hidden]``.
            cache: this layer's entry of the KV cache.
            logits_only: return only the rows ``batch.logits_indices``, as the last layer of a model does.
            export: where the tokens' keys and values are copied once they are stored.

        Returns:
            ``[tokens, hidden]``, or ``[rows, hidden]`` with ``logits_only``.
        """
        ...


class Attention:
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions.

    Args:
        name: of the checkpoint's module, above ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``.
        rope: ``[max_len, head_dim]``, of ``BuildContext.rope_table``.
        window: positions that a query sees, its own included (sliding window); 0 is all.
        qk_norm_eps: epsilon of RMS norms on the queries and keys of each head; None where there are none.
        input_size: of what is projected to queries, keys and values; None is ``hidden_size``.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: Tensor,
        window: int = 0,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        input_size: int | None = None,
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._rope = rope
        self._head_dim = head_dim
        self._window = window
        queries, keys = (heads * head_dim for heads in shard_heads(context.group, num_heads, num_kv_heads))
        self._queries = queries
        self._num_kv_heads = keys.size // head_dim
        self._sizes = [queries.size, keys.size, keys.size]
        names = [f"{name}.{part}_proj" for part in "qkv"]
        self._qkv = ColumnParallelLinear(context, names, input_size or hidden_size, [queries, keys, keys], qkv_bias)
        shards = [shard_outputs(context.group, hidden_size)]
        self._output = ColumnParallelLinear(
            context, [f"{name}.o_proj"], num_heads * head_dim, shards, output_bias, gather_output=True
        )
        self._qk_norms = None
        if qk_norm_eps is not None:
            q_weight, k_weight = (context.read_weight(f"{name}.{part}_norm.weight", head_dim) for part in "qk")
            self._qk_norms = QKNorms(q_weight, k_weight, qk_norm_eps)

    def kv_spec(self, block_size: int, quantization: str) -> KVSpec:
        dtype = str(self._dtype).removeprefix("torch.")
        return KVSpec(self._num_kv_heads, self._head_dim, dtype, block_size, quantization, self._window)

    def __call__(
        self, x: Tensor, cache: Any, batch: Batch, logits_only: bool, export: LayerExport | None = None
    ) -> Tensor:
        metadata, lora_slots = batch.attention, batch.lora_slots
        qkv = self._qkv(x, lora_slots).split(self._sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in qkv)
        q = self._ops.rope_and_store(q, k, v, batch.positions, self._rope, cache, batch.slot_mapping, self._qk_norms)
        if export is not None and batch.export_places is not None:
            self._ops.export_kv(
                cache, batch.slot_mapping, export.buffer, batch.export_places, export.layout, export.progress
            )
        if logits_only:
            q = self._ops.index_select(q, batch.logits_indices)
            metadata, lora_slots = batch.logits_attention, batch.logits_lora_slots
        attended = self._group.all_gather(
            lambda out: self._ops.attention(q, cache, metadata, self._head_dim**-0.5, self._window, out),
            q.shape[0],
            self._queries,
            self._dtype,
        )
        return self._output(attended, lora_slots)
