"""Grouped-query attention, and the interface of attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from penstock.ops import AttentionMetadata, AttentionOptions, Batch, KVSpec, LayerExport, Ops, QKNorms
from penstock.parallel import shard_heads, shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear
from .norm import Norm


class AttentionLayer(Protocol):
    """The interface of attention layers."""

    def kv_spec(self, block_size: int, quantization: str) -> KVSpec:
        """Shape of this layer's KV cache."""
        ...

    def __call__(
        self, x: Tensor, cache: Any, batch: Batch, logits_only: bool, export: LayerExport | None = None
    ) -> Tensor:
        """Store the keys and values of all tokens in the KV cache, and compute attention.

        Args:
            x: ``[tokens, hidden]``.
            cache: KV cache of this layer.
            logits_only: return only the rows ``batch.logits_indices``, as the last layer of a model does.
            export: destination of a copy of the stored keys and values.

        Returns:
            ``[tokens, hidden]``, or ``[rows, hidden]`` with ``logits_only``.
        """
        ...


def copy_and_export(ops: Ops, cache: Any, batch: Batch, export: LayerExport | None) -> None:
    """Copy the keys and values that were just stored: within the cache (``batch.slot_copies``), and to ``export``."""
    if batch.slot_copies:
        ops.copy_slots(cache, *batch.slot_copies)
    if export is not None and batch.export_places is not None:
        ops.export_kv(cache, batch.slot_mapping, export.buffer, batch.export_places, export.layout, export.progress)


def select(ops: Ops, q: Tensor, batch: Batch, logits_only: bool) -> tuple[Tensor, AttentionMetadata, Tensor | None]:
    """Queries to compute, with their metadata and LoRA slots: all of ``q``, or, with ``logits_only``, those of
    ``batch.logits_indices``."""
    if logits_only:
        return ops.index_select(q, batch.logits_indices), batch.logits_attention, batch.logits_lora_slots
    return q, batch.attention, batch.lora_slots


@dataclass(frozen=True)
class QKNormLayers:
    """Norms of queries and keys that are not fused with the rotary embedding."""

    q: Norm
    k: Norm
    over_projection: bool = False
    """True: normalize all heads of a token together; False: each head."""
    after_rope: bool = False
    """True: normalize after the rotary embedding."""


class Attention:
    """Grouped-query attention (Ainslie et al., 2023) with rotary embedding.

    Args:
        name: module in the checkpoint with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``.
        rope: ``[max_len, rotary_dim]`` from ``BuildContext.rope_table``.
        window: sliding window: number of positions that a query sees, including its own; 0: all.
        chunked: chunked attention (Llama 4): a query sees only its chunk of ``window`` positions.
        query_factors: ``[max_len, head_dim]`` float32: factor of the queries at each position, in the first half of a
            row; the second half is zeros. This is a rotary table without rotation, applied last. None: no factors.
        qk_norms: norms of each head's queries and keys, fused with the rotary embedding.
        qk_norm_layers: norms of queries and keys that are not fused.
        rope_interleaved: rotate adjacent dimensions (GPT-J) instead of the two halves of a head (GPT-NeoX).
        scale: softmax scale; None: ``head_dim ** -0.5``.
        softcap: soft cap of the attention scores, ``cap * tanh(score / cap)``; 0: off.
        sinks: sink logits of this rank's heads, ``[heads]`` float32; None: no sinks.
        alibi: ALiBi slopes of this rank's heads, ``[heads]`` float32; None: off.
        gated: multiply the output by the sigmoid of ``q_gate`` of the input.
        input_size: size of the input of ``q_proj``, ``k_proj`` and ``v_proj``; None: ``hidden_size``.
        projections: projections in the checkpoint: all; ``qk``: keys are also the values, before their norms; ``q``:
            the layer attends to keys and values of another layer (``SharedKVAttention``).
        value_norm: norm of each head's values; None: no norm.
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
        chunked: bool = False,
        query_factors: Tensor | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norms: QKNorms | None = None,
        qk_norm_layers: QKNormLayers | None = None,
        rope_interleaved: bool = False,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        gated: bool = False,
        input_size: int | None = None,
        projections: Literal["qkv", "qk", "q"] = "qkv",
        value_norm: Norm | None = None,
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._rope = rope
        self._rope_interleaved = rope_interleaved
        self._head_dim = head_dim
        self._query_factors = query_factors
        scale = head_dim**-0.5 if scale is None else scale
        self._options = AttentionOptions(scale, window, softcap, sinks, chunked=chunked, alibi=alibi)
        queries, keys = (heads * head_dim for heads in shard_heads(context.group, num_heads, num_kv_heads))
        self._queries, self._keys = queries, keys
        self._num_kv_heads = keys.size // head_dim
        self._sizes = [queries.size, keys.size, keys.size][: len(projections)]
        q_proj, k_proj, v_proj = names = [f"{name}.{part}_proj" for part in "qkv"]
        self._value_norm = value_norm
        self._qk_norms, self._qk_norm_layers = qk_norms, qk_norm_layers
        self._qkv = self._q = self._k = None
        inputs = input_size or hidden_size
        if qk_norm_layers and qk_norm_layers.over_projection:
            # Every rank normalizes all heads, so it needs the queries and keys of all ranks.
            self._q, self._k = (
                ColumnParallelLinear(
                    context, [each], inputs, [shard_outputs(context.group, total)], qkv_bias, gather_output=True
                )
                for each, total in ((q_proj, queries.total), (k_proj, keys.total))
            )
            self._v = ColumnParallelLinear(context, [v_proj], inputs, [keys], qkv_bias)
        else:
            count = len(projections)
            shards = [queries, keys, keys][:count]
            self._qkv = ColumnParallelLinear(context, names[:count], inputs, shards, qkv_bias)
        self._gate = ColumnParallelLinear(context, [f"{name}.q_gate"], inputs, [queries], qkv_bias) if gated else None
        shards = [shard_outputs(context.group, hidden_size)]
        self._output = ColumnParallelLinear(
            context, [f"{name}.o_proj"], num_heads * head_dim, shards, output_bias, gather_output=True
        )

    def kv_spec(self, block_size: int, quantization: str) -> KVSpec:
        dtype = str(self._dtype).removeprefix("torch.")
        return KVSpec(self._num_kv_heads, self._head_dim, dtype, block_size, quantization, self._options.window)

    def __call__(
        self, x: Tensor, cache: Any, batch: Batch, logits_only: bool, export: LayerExport | None = None
    ) -> Tensor:
        q, metadata, lora_slots = select(self._ops, self._queries_of(x, cache, batch, export), batch, logits_only)
        gate = None
        if self._gate:
            gate = self._gate(self._ops.index_select(x, batch.logits_indices) if logits_only else x, lora_slots)

        def attend(out: Tensor | None) -> Tensor:
            attended = self._ops.attention(q, cache, metadata, self._options, None if self._gate else out)
            return attended if gate is None else self._ops.multiply_gate(attended, gate, out)

        attended = self._group.all_gather(attend, q.shape[0], self._queries, self._dtype)
        return self._output(attended, lora_slots)

    def _queries_of(self, x: Tensor, cache: Any, batch: Batch, export: LayerExport | None) -> Tensor:
        """This rank's queries, ``[tokens, heads, head_dim]``. Stores its keys and values."""
        q = self._store(*self._project(x, batch.lora_slots), cache, batch)
        copy_and_export(self._ops, cache, batch, export)
        return q

    def _project(self, x: Tensor, lora_slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's queries, keys and values, ``[tokens, heads, head_dim]`` each."""
        if self._qkv:
            q, k, *values = self._qkv(x, lora_slots).split(self._sizes, -1)
            v = values[0] if values else k
        else:
            assert self._q and self._k and self._qk_norm_layers
            q = self._qk_norm_layers.q(self._q(x, lora_slots))[:, self._queries.first : self._queries.end]
            k = self._qk_norm_layers.k(self._k(x, lora_slots))[:, self._keys.first : self._keys.end]
            v = self._v(x, lora_slots)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in (q, k, v))
        return q, k, v

    def _store(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, batch: Batch) -> Tensor:
        """Normalize and rotate queries and keys, and store keys and values. Returns the queries."""
        positions, slots, norms = batch.positions, batch.slot_mapping, self._qk_norm_layers
        v = self._value_norm(v) if self._value_norm else v
        if norms and norms.after_rope:
            q, k = (self._ops.rope(part, positions, self._rope, self._rope_interleaved) for part in (q, k))
            q, k = norms.q(q), norms.k(k)
            self._ops.store_kv(cache, k, v, slots)
            return q
        if norms and not norms.over_projection:
            q, k = norms.q(q), norms.k(k)
        q = self._ops.rope_and_store(
            q, k, v, positions, self._rope, cache, slots, self._qk_norms, self._rope_interleaved
        )
        return q if self._query_factors is None else self._ops.rope(q, positions, self._query_factors)


class SharedKVAttention(Attention):
    """Attention to the keys and values of another layer, whose cache it gets (Gemma 4).

    Args:
        query_norm: norm of each head's queries.
        options: arguments of ``Attention``.
    """

    def __init__(self, context: BuildContext, name: str, *, query_norm: Norm, **options: Any) -> None:
        super().__init__(context, name, projections="q", **options)
        self._query_norm = query_norm

    def _queries_of(self, x: Tensor, cache: Any, batch: Batch, export: LayerExport | None) -> Tensor:
        assert self._qkv
        q = self._qkv(x, batch.lora_slots).unflatten(-1, (-1, self._head_dim))
        return self._ops.rope(self._query_norm(q), batch.positions, self._rope)
