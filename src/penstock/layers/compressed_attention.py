"""Compressed attention (DeepSeek-V4): a sliding window, and compressed entries of earlier tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.compressed_config import CompressedConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.ops import AttentionMetadata, Batch, KVSpec, LayerExport
from penstock.ops.compressed import Compression
from penstock.parallel import Shard, shard_heads, shard_outputs

from .attention import copy_and_export, select
from .context import BuildContext
from .linear import ColumnParallelLinear
from .norm import RMSNorm, UnweightedRMSNorm


class Compressor:
    """Compressed entries of a layer, or their index keys. Every rank computes all of them.

    Args:
        name: module in the checkpoint with ``wkv``, ``wgate``, ``ape`` and ``norm``.
        rope: ``[max_len, rope_dim]`` from ``BuildContext.rope_table``.
    """

    def __init__(self, context: BuildContext, name: str, hidden_size: int, sizes: Compression, rope: Tensor) -> None:
        self._ops, self._sizes, self._rope = context.ops, sizes, rope
        channels = sizes.channels
        shards = [Shard(0, channels, channels)] * 2
        self._projection = ColumnParallelLinear(context, [f"{name}.wkv", f"{name}.wgate"], hidden_size, shards)
        self._bias = context.read_weight(f"{name}.ape", sizes.rate, channels, as_stored=True).float().contiguous()
        self._norm = context.read_weight(f"{name}.norm.weight", sizes.dim, as_stored=True).float()

    def __call__(self, x: Tensor, cache: Any, states: dict[str, Tensor], batch: Batch) -> None:
        projected = self._projection(x)
        self._ops.compress(projected, self._sizes, self._bias, self._norm, self._rope, cache, states, batch)


class EntryIndexer:
    """Lightning indexer of entries (see ``Indexer``).

    Args:
        name: module in the checkpoint with ``wq_b`` and ``weights_proj``.
    """

    def __init__(self, context: BuildContext, name: str, hidden_size: int, config: CompressedConfig) -> None:
        self._ops, self._heads = context.ops, config.index_heads
        heads, queries = config.index_heads, config.index_heads * config.index_dim
        self._query = ColumnParallelLinear(context, [f"{name}.wq_b"], config.q_rank, [Shard(0, queries, queries)])
        self._to_float32 = context.dtype != torch.float32
        wide = replace(context, dtype=torch.float32)
        self._weights = wide.unquantized_matrix(f"{name}.weights_proj", hidden_size, Shard(0, heads, heads))
        self.scale = queries**-0.5

    def __call__(self, x: Tensor, q_latent: Tensor, positions: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries, ``[tokens, heads, dim]``, and weights of heads, ``[tokens, heads]`` float32."""
        q = self._query(q_latent).unflatten(-1, (self._heads, -1))
        self._ops.rotate_tail(q, positions, rope)
        return q, self._weights.linear(self._ops.to_float32(x) if self._to_float32 else x, out_float32=True)


class CompressedAttention:
    """An ``AttentionLayer`` with one vector per token, which is key and value of all heads (DeepSeek-AI, 2026,
    "DeepSeek-V4"). Queries attend to the tokens of a sliding window, and to compressed entries: all of them, or those
    that an indexer selects. A query attends to an entry if it is not before the entry's last token. The output is
    rotated back by the query's position.

    Heads are split among ranks; each rank computes and caches the vectors of all tokens. In a layer with entries, a
    token's vector in the cache goes on with the entry that ends with this token, and its index key. The tokens of
    incomplete entries are a recurrent state (``HasState``).

    Args:
        name: module in the checkpoint.
        layer: index of the layer.
    """

    state_index = -1

    def __init__(
        self,
        context: BuildContext,
        name: str,
        layer: int,
        *,
        hidden_size: int,
        num_heads: int,
        config: CompressedConfig,
        max_position_embeddings: int,
        eps: float,
    ) -> None:
        self._ops, self._group = context.ops, context.group
        self._dtype, self._config, self._layer = context.dtype, config, layer
        kind, dim, rank = config.kinds[layer], config.head_dim, config.q_rank
        parameters = config.window_rope if kind == "none" else config.rope
        self._rope = rope = context.rope_table(config.rope_dim, parameters, max_position_embeddings)
        heads = shard_heads(context.group, num_heads, 1)[0]
        self._num_heads = heads.size
        down = [f"{name}.wq_a", f"{name}.wkv"]
        self._down = ColumnParallelLinear(context, down, hidden_size, [Shard(0, rank, rank), Shard(0, dim, dim)])
        self._q_norm = RMSNorm(context, f"{name}.q_norm", rank, eps, float32=True, as_stored=True)
        self._query = ColumnParallelLinear(context, [f"{name}.wq_b"], rank, [heads * dim])
        self._head_norm = UnweightedRMSNorm(context, dim, eps)
        self._norm = RMSNorm(context, f"{name}.norm", dim, eps, float32=True, as_stored=True)
        sinks = context.read_weight(f"{name}.attn_sink", num_heads, rows=heads.rows, as_stored=True)
        self._sinks = sinks.float()

        self._compressors: list[Compressor] = []
        self._indexer: EntryIndexer | None = None
        self._rate, self._max_entries = config.rate(layer), 0
        if self._rate:
            self._max_entries = max(context.max_len // self._rate, 1)
            overlap = kind == "selected"
            sizes = Compression(dim, self._rate, overlap, dim, eps, "entry", "entry_in")
            self._compressors.append(Compressor(context, f"{name}.compressor", hidden_size, sizes, rope))
            if overlap:
                self._max_entries = min(self._max_entries, config.topk)
                sizes = Compression(config.index_dim, self._rate, True, 2 * dim, eps, "index", "index_in")
                index = f"{name}.indexer"
                self._compressors.append(Compressor(context, f"{index}.compressor", hidden_size, sizes, rope))
                self._indexer = EntryIndexer(context, index, hidden_size, config)

        in_group = num_heads // config.groups
        groups = Shard(heads.first // in_group, heads.end // in_group, config.groups)
        self._mixed = groups * config.group_rank
        up = context.read_matrix(f"{name}.wo_a", in_group * dim, self._mixed)
        self._groups = groups.size
        self._outputs_of_groups = context.ops.pack_by_head(up.unflatten(0, (groups.size, -1)).contiguous())
        shards = [shard_outputs(context.group, hidden_size)]
        self._output = ColumnParallelLinear(
            context, [f"{name}.wo_b"], config.groups * config.group_rank, shards, gather_output=True
        )

    @property
    def has_state(self) -> bool:
        return self._rate > 0

    def state_spec(self) -> StateSpec:
        """Shape of the state of incomplete entries."""
        return self._config.state_spec(self._layer, str(self._dtype).removeprefix("torch."))

    def kv_spec(self, block_size: int, quantization: str) -> KVSpec:
        dtype, dim, entry = (
            str(self._dtype).removeprefix("torch."),
            self._config.head_dim,
            self._config.entry_dim(self._layer),
        )
        return KVSpec(1, dim + entry, dtype, block_size, quantization, latent=dim, index_dim=entry)

    def __call__(
        self, x: Tensor, cache: Any, batch: Batch, logits_only: bool, export: LayerExport | None = None
    ) -> Tensor:
        ops, dim, positions = self._ops, self._config.head_dim, batch.positions
        queries, q_latent = self._store(x, cache, batch)
        if self._compressors:
            assert batch.states
            for compressor in self._compressors:
                compressor(x, cache, batch.states.cache[self.state_index], batch)
        copy_and_export(ops, cache, batch, export)
        queries, metadata, _ = select(ops, queries, batch, logits_only)
        if logits_only:
            x, q_latent, positions = (ops.index_select(each, batch.logits_indices) for each in (x, q_latent, positions))
        selection = self._select(x, q_latent, positions, cache, metadata)
        attended = ops.compressed_attention(queries, cache, selection, dim**-0.5, self._sinks)
        ops.rotate_tail(attended, positions, self._rope, inverse=True)

        def mixed(out: Tensor | None) -> Tensor:
            by_group = None if out is None else out.unflatten(-1, (self._groups, -1))
            groups = attended.flatten(1).unflatten(1, (self._groups, -1))
            return ops.linear_by_head(groups, self._outputs_of_groups, by_group).flatten(1)

        gathered = self._group.all_gather(mixed, attended.shape[0], self._mixed, self._dtype)
        return self._output(gathered)

    def _select(
        self, x: Tensor, q_latent: Tensor, positions: Tensor, cache: Any, metadata: AttentionMetadata
    ) -> AttentionMetadata:
        arguments = cache, metadata, x.shape[0], self._config.window, self._rate, self._max_entries
        if self._indexer is None:
            return self._ops.select_entries(*arguments)
        q, weights = self._indexer(x, q_latent, positions, self._rope)
        return self._ops.select_entries(*arguments, q, weights, self._indexer.scale)

    def _store(self, x: Tensor, cache: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Store the tokens' vectors. Returns queries, ``[tokens, heads, dim]``, and their latent vectors, ``[tokens,
        q_rank]``."""
        rank, plain = self._config.q_rank, self._config.head_dim - self._config.rope_dim
        down = self._down(x)
        q_latent, vectors = self._q_norm(down[:, :rank]), self._norm(down[:, rank:])
        queries = self._head_norm(self._query(q_latent).unflatten(-1, (self._num_heads, -1)))
        self._ops.latent_rope_and_store(
            queries[..., plain:],
            vectors[:, plain:],
            vectors[:, :plain],
            batch.positions,
            self._rope,
            cache,
            batch.slot_mapping,
            True,
            queries[..., plain:],
        )
        return queries, q_latent
