"""Multi-head latent attention (MLA), dense and sparse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.latent_config import IndexerConfig
from penstock.ops import AttentionMetadata, Batch, KVSpec, LayerExport, Ops
from penstock.parallel import Shard, shard_heads, shard_outputs

from .attention import copy_and_export, select
from .context import BuildContext
from .linear import ColumnParallelLinear
from .norm import LayerNorm, RMSNorm

NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors. As in transformers and DeepSeek's code, ``rms_norm_eps`` is not used."""


class Indexer:
    """Lightning indexer of sparse attention (DeepSeek-V3.2): index queries from the latent vector of the queries, one
    index key per token, and a weight per head. Every rank computes all heads, so that the sum of a score has one order.
    Keys are stored in the model's dtype, without the rotation and quantization of DeepSeek's code.

    Args:
        name: module in the checkpoint with ``wq_b``, ``wk``, ``k_norm`` and ``weights_proj``.
        rope: ``[max_len, rope_dim]`` from ``BuildContext.rope_table``.
    """

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, q_rank: int, rope: Tensor, config: IndexerConfig
    ) -> None:
        self._ops, self._config, self._rope = context.ops, config, rope
        heads, dim, queries = config.heads, config.dim, config.heads * config.dim
        self._query = ColumnParallelLinear(context, [f"{name}.wq_b"], q_rank, [Shard(0, queries, queries)])
        self._key = ColumnParallelLinear(context, [f"{name}.wk"], hidden_size, [Shard(0, dim, dim)])
        self._norm = LayerNorm(context, f"{name}.k_norm", dim, NORM_EPS, bias=True)
        self._to_float32 = context.dtype != torch.float32
        weights_context = replace(context, dtype=torch.float32)
        self._weights = weights_context.unquantized_matrix(f"{name}.weights_proj", hidden_size, Shard(0, heads, heads))
        self._scale = (heads * dim) ** -0.5

    def keys(self, x: Tensor, batch: Batch) -> Tensor:
        """Index keys of tokens, ``[tokens, dim]``."""
        keys = self._norm(self._key(x, batch.lora_slots))[:, None]
        return self._ops.rope(keys, batch.positions, self._rope, self._config.interleave).flatten(1)

    def select(
        self,
        x: Tensor,
        q_latent: Tensor,
        positions: Tensor,
        cache: Any,
        metadata: AttentionMetadata,
        lora_slots: Tensor | None,
    ) -> AttentionMetadata:
        """Select the keys of queries (see ``reference.select_keys``).

        Args:
            x: input of the layer, ``[tokens, hidden]``.
            q_latent: latent vectors of the queries, ``[tokens, q_rank]``.
        """
        q = self._query(q_latent, lora_slots).unflatten(-1, (self._config.heads, -1))
        q = self._ops.rope(q, positions, self._rope, self._config.interleave)
        weights = self._weights.linear(self._ops.to_float32(x) if self._to_float32 else x, out_float32=True)
        return self._ops.select_keys(q, weights, cache, metadata, self._config.topk, self._scale)


class LatentAttention:
    """An ``AttentionLayer``: multi-head latent attention (DeepSeek-AI, 2024) with absorbed projections. The up
    projection of keys is applied to the queries; the up projection of values to the attention output. Heads attend to
    the latent vectors; keys and values are never computed. Prefill and decode use the same computation, so a token's
    bits do not depend on the number of tokens computed with it.

    Heads are split among ranks; each rank computes and caches the latent vectors of all tokens.

    Args:
        name: module in the checkpoint with ``kv_a_proj_with_mqa``, ``kv_b_proj``, ``o_proj``.
        q_rank: size of the queries' latent vector (``q_lora_rank``); None: a full-rank projection.
        latent: size of the latent vector of keys and values (``kv_lora_rank``).
        nope_dim, rope_dim: elements per query without and with rotary embedding, in this order.
        value_dim: elements per value.
        rope: ``[max_len, rope_dim]`` from ``BuildContext.rope_table``; None: no rotary embedding.
        interleaved: rotate adjacent dimensions (GPT-J).
        scale: softmax scale.
        bias: the down projections and the output projection have biases.
        indexer: settings of sparse attention; None: attention to all positions. Requires ``q_rank`` and ``rope``.
        shares_selection: the layer has no indexer, and uses ``Batch.selection``.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        q_rank: int | None,
        latent: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        rope: Tensor | None,
        interleaved: bool,
        scale: float,
        bias: bool = False,
        indexer: IndexerConfig | None = None,
        shares_selection: bool = False,
    ) -> None:
        self._ops, self._group = context.ops, context.group
        self._dtype, self._device = context.dtype, context.device
        self._positions: Tensor | None = None
        self._is_sparse, self._index_dim = indexer is not None, 0
        self._indexer: Indexer | None = None
        if indexer and not shares_selection:
            assert q_rank and rope is not None
            self._index_dim = indexer.dim
            self._indexer = Indexer(context, f"{name}.indexer", hidden_size, q_rank, rope, indexer)
        if rope is None:  # the rotation by position 0 is the identity
            half, device = rope_dim // 2, context.device
            rope = torch.cat((torch.ones(1, half, device=device), torch.zeros(1, half, device=device)), -1)
            self._positions = torch.zeros(context.max_step_tokens, dtype=torch.int64, device=device)
        self._rope, self._interleaved, self._scale = rope, interleaved, scale
        self._q_rank, self._latent = q_rank or 0, latent
        self._nope_dim, self._rope_dim, self._value_dim = nope_dim, rope_dim, value_dim
        heads = shard_heads(context.group, num_heads, 1)[0]
        self._num_heads, self._values = heads.size, heads * value_dim

        query = heads * (nope_dim + rope_dim)
        down, sizes = [f"{name}.kv_a_proj_with_mqa"], [latent + rope_dim]
        if q_rank:
            down, sizes = [f"{name}.q_a_proj", *down], [q_rank, *sizes]
            self._q_norm = RMSNorm(context, f"{name}.q_a_layernorm", q_rank, NORM_EPS)
        every_rank = [Shard(0, size, size) for size in sizes]
        self._down = ColumnParallelLinear(context, down, hidden_size, every_rank, bias)
        q_name = f"{name}.q_b_proj" if q_rank else f"{name}.q_proj"
        self._query = ColumnParallelLinear(context, [q_name], q_rank or hidden_size, [query])
        self._latent_norm = RMSNorm(context, f"{name}.kv_a_layernorm", latent, NORM_EPS)
        up = context.read_matrix(f"{name}.kv_b_proj", latent, heads * (nope_dim + value_dim))
        keys, values = up.unflatten(0, (heads.size, -1)).split([nope_dim, value_dim], 1)
        self._keys = context.ops.pack_by_head(keys.transpose(1, 2))
        self._values_of_latent = context.ops.pack_by_head(values)
        shards = [shard_outputs(context.group, hidden_size)]
        self._output = ColumnParallelLinear(
            context, [f"{name}.o_proj"], num_heads * value_dim, shards, bias, gather_output=True
        )

    def kv_spec(self, block_size: int, quantization: str) -> KVSpec:
        dtype = str(self._dtype).removeprefix("torch.")
        size = self._latent + self._rope_dim + self._index_dim
        return KVSpec(1, size, dtype, block_size, quantization, latent=self._latent, index_dim=self._index_dim)

    def __call__(
        self, x: Tensor, cache: Any, batch: Batch, logits_only: bool, export: LayerExport | None = None
    ) -> Tensor:
        queries, q_latent = self._store(x, cache, batch)
        copy_and_export(self._ops, cache, batch, export)
        queries, metadata, lora_slots = select(self._ops, queries, batch, logits_only)
        if self._is_sparse:
            metadata = self._select_keys(x, q_latent, cache, batch, logits_only)
        attended = self._ops.latent_attention(
            queries, cache, metadata, self._scale, self._latent, selected=self._is_sparse
        )

        def values(out: Tensor | None) -> Tensor:
            by_head = None if out is None else out.unflatten(-1, (self._num_heads, self._value_dim))
            return self._ops.linear_by_head(attended, self._values_of_latent, by_head).flatten(1)

        gathered = self._group.all_gather(values, attended.shape[0], self._values, self._dtype)
        return self._output(gathered, lora_slots)

    def _select_keys(
        self, x: Tensor, q_latent: Tensor, cache: Any, batch: Batch, logits_only: bool
    ) -> AttentionMetadata:
        """Select the keys of all queries, or, with ``logits_only``, of ``batch.logits_indices``."""
        if self._indexer is None:
            assert batch.selection, "no earlier layer of this stage has selected keys"
            return _of_rows(self._ops, batch.selection, batch.logits_indices) if logits_only else batch.selection
        positions, metadata, lora_slots = batch.positions, batch.attention, batch.lora_slots
        if logits_only:
            x, q_latent, positions = (
                self._ops.index_select(each, batch.logits_indices) for each in (x, q_latent, positions)
            )
            metadata, lora_slots = batch.logits_attention, batch.logits_lora_slots
        batch.selection = self._indexer.select(x, q_latent, positions, cache, metadata, lora_slots)
        return batch.selection

    def _store(self, x: Tensor, cache: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Store the tokens' latent vectors and index keys. Returns their absorbed queries, ``[tokens, heads, latent +
        rope_dim]``, and the latent vectors of the queries, ``[tokens, q_rank]`` (without ``q_rank``: ``x``)."""
        down = self._down(x, batch.lora_slots)
        q_input = self._q_norm(down[:, : self._q_rank]) if self._q_rank else x
        q = self._query(q_input, batch.lora_slots).unflatten(-1, (self._num_heads, -1))
        latent, k = down[:, self._q_rank :].split([self._latent, self._rope_dim], -1)
        shape = x.shape[0], self._num_heads, self._latent + self._rope_dim
        queries = self._ops.empty(shape, self._dtype, self._device)
        self._ops.linear_by_head(q[..., : self._nope_dim], self._keys, queries[..., : self._latent])
        self._ops.latent_rope_and_store(
            q[..., self._nope_dim :],
            k,
            self._latent_norm(latent),
            batch.positions if self._positions is None else self._positions[: x.shape[0]],
            self._rope,
            cache,
            batch.slot_mapping,
            self._interleaved,
            queries[..., self._latent :],
            self._indexer.keys(x, batch) if self._indexer else None,
        )
        return queries, q_input


def _of_rows(ops: Ops, selection: AttentionMetadata, rows: Tensor) -> AttentionMetadata:
    """The selection (``Ops.select_keys``) of some queries."""
    counts, slots = (ops.index_select(each, rows) for each in (selection.seq_lens, selection.block_tables))
    starts = selection.query_start_loc[: len(rows) + 1]
    return replace(selection, query_start_loc=starts, seq_lens=counts, block_tables=slots, plan=None)
