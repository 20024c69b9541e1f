"""Multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.ops import Batch, KVSpec, LayerExport
from penstock.parallel import Shard, shard_heads, shard_outputs

from .attention import copy_and_export, select
from .context import BuildContext
from .linear import ColumnParallelLinear
from .norm import RMSNorm

NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors. As in transformers and DeepSeek's code, ``rms_norm_eps`` is not used."""


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
    ) -> None:
        self._ops, self._group = context.ops, context.group
        self._dtype, self._device = context.dtype, context.device
        self._positions: Tensor | None = None
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
        return KVSpec(1, self._latent + self._rope_dim, dtype, block_size, quantization, latent=self._latent)

    def __call__(
        self, x: Tensor, cache: Any, batch: Batch, logits_only: bool, export: LayerExport | None = None
    ) -> Tensor:
        queries = self._store(x, cache, batch)
        copy_and_export(self._ops, cache, batch, export)
        queries, metadata, lora_slots = select(self._ops, queries, batch, logits_only)
        attended = self._ops.latent_attention(queries, cache, metadata, self._scale, self._latent)

        def values(out: Tensor | None) -> Tensor:
            by_head = None if out is None else out.unflatten(-1, (self._num_heads, self._value_dim))
            return self._ops.linear_by_head(attended, self._values_of_latent, by_head).flatten(1)

        gathered = self._group.all_gather(values, attended.shape[0], self._values, self._dtype)
        return self._output(gathered, lora_slots)

    def _store(self, x: Tensor, cache: Any, batch: Batch) -> Tensor:
        """Store the tokens' latent vectors. Returns their absorbed queries, ``[tokens, heads, latent + rope_dim]``."""
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
        )
        return queries
