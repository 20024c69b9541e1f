"""Zamba2 (Zyphra, 2024): Mamba 2 layers; before some of them a block of attention and MLP, which several layers share,
and which reads the residual stream and the embedding of the token."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.core.quantization import UNQUANTIZED
from penstock.layers import Attention, BuildContext, ColumnParallelLinear, Embedding, RMSNorm
from penstock.ops import Batch, LayerExport
from penstock.parallel import Shard, shard_heads, shard_outputs

from .decoder import Decoder
from .families.zamba2 import ROTATED, block_name, hybrid_layers
from .layer import AttentionFactory, DecoderLayer, MLPFactory, make_norm, make_state


class LowRankAdapter:
    """Product of two matrices, which a layer adds to a matrix that it shares with other layers.

    Args:
        down: name of the first matrix, ``[rank, inputs]``.
        ups: names of the parts of the second matrix, ``[outputs, rank]``.
        shards: this rank's outputs of each part.
    """

    def __init__(
        self, context: BuildContext, down: str, ups: list[str], inputs: int, rank: int, shards: list[Shard]
    ) -> None:
        self._down = context.matrix([down], inputs, [Shard(0, rank, rank)], UNQUANTIZED)
        self._up = context.matrix(ups, rank, shards, UNQUANTIZED)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._up.linear(self._down.linear(x), out=out)


class AdaptedAttention(Attention):
    """Attention with adapters of queries, keys and values."""

    adapters: Sequence[LowRankAdapter] = ()

    def with_adapters(self, adapters: Sequence[LowRankAdapter]) -> AdaptedAttention:
        """This attention with adapters; both have the same matrices."""
        adapted = copy(self)
        adapted.adapters = adapters
        return adapted

    def _project(self, x: Tensor, lora_slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        assert self._qkv
        products, first = self._qkv(x, lora_slots), 0
        if self.adapters:
            changes = self._ops.empty(products.shape, products.dtype, products.device)
            for adapter, size in zip(self.adapters, self._sizes, strict=True):
                adapter(x, changes[:, first : first + size])
                first += size
            products = self._ops.add_residual(changes, products)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in products.split(self._sizes, -1))
        return q, k, v


class SharedBlock:
    """Norms, attention and MLP that several layers share.

    Args:
        name: module in the checkpoint.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, name: str) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        context = replace(context, max_loras=0)  # an adapter is for a single layer, but layers share these modules
        hidden, eps, bias = config.hidden_size, config.rms_norm_eps, config.mlp_bias
        self.attention_norm = RMSNorm(context, f"{name}.input_layernorm", 2 * hidden, eps)
        self.mlp_norm = RMSNorm(context, f"{name}.pre_ff_layernorm", hidden, eps)
        rope = context.rope_table(
            config.head_dim if config.raw.get(ROTATED) else 0, config.rope_parameters, config.max_position_embeddings
        )
        self.attention = AdaptedAttention(
            context,
            f"{name}.self_attn",
            hidden_size=hidden,
            input_size=2 * hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope=rope,
            scale=config.options.attention_scale,
        )
        self._activation, mlp = config.options.activation, f"{name}.feed_forward"
        self.shard = shard_outputs(context.group, config.intermediate_size)
        names = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        self._gate_up = ColumnParallelLinear(context, names, hidden, [self.shard] * 2, bias)
        self._down = ColumnParallelLinear(
            context,
            [f"{mlp}.down_proj"],
            config.intermediate_size,
            [shard_outputs(context.group, hidden)],
            bias,
            gather_output=True,
        )

    def mlp(self, x: Tensor, adapter: LowRankAdapter, lora_slots: Tensor | None) -> Tensor:
        """The MLP of ``[tokens, hidden]``."""
        products = self._ops.add_residual(adapter(x), self._gate_up(x, lora_slots))
        activations = self._group.all_gather(
            lambda out: self._ops.activation_and_mul(products, self._activation, out),
            x.shape[0],
            self.shard,
            self._dtype,
        )
        return self._down(activations, lora_slots)


class HybridLayer(DecoderLayer):
    """A shared block, whose output is projected and added to the input of a Mamba 2 layer, but not to the residual
    stream.

    Args:
        number: index of the layer.
    """

    def __init__(
        self, context: BuildContext, config: ModelConfig, number: int, block: SharedBlock, embedding: Embedding
    ) -> None:
        name, hidden, rank = f"model.layers.{number}", config.hidden_size, int(config.raw["adapter_rank"])
        use, block_module = hybrid_layers(config).index(number), block_name(config, number)
        self._ops = context.ops
        self._last = number == config.num_layers - 1
        self._block, self._embedding = block, embedding
        self.attention = block.attention
        if config.raw.get("use_shared_attention_adapter"):
            heads = shard_heads(context.group, config.num_heads, config.num_kv_heads)
            parts = zip("qkv", (heads[0], heads[1], heads[1]), strict=True)
            lists = [(f"{block_module}.self_attn.linear_{part}_adapter_list.{use}", shard) for part, shard in parts]
            self.attention = block.attention.with_adapters(
                [
                    LowRankAdapter(context, f"{each}.0", [f"{each}.1"], 2 * hidden, rank, [shard * config.head_dim])
                    for each, shard in lists
                ]
            )
        adapter = f"{block_module}.feed_forward.gate_up_proj_adapter_list.{use}"
        parts_of_up = [f"{adapter}.gate", f"{adapter}.up"]
        self._adapter = LowRankAdapter(context, f"{adapter}.0", parts_of_up, hidden, rank, [block.shard] * 2)
        shards = [shard_outputs(context.group, hidden)]
        self._linear = ColumnParallelLinear(context, [f"{name}.linear"], hidden, shards, gather_output=True)
        self._norm = make_norm(context, config, f"{name}.input_layernorm", hidden)
        self.state = make_state(context, config, number, name)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: Any, batch: Batch, export: LayerExport | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``DecoderLayer``."""
        ops, block, lora_slots = self._ops, self._block, batch.lora_slots
        assert self.attention and self.state
        residual = x if residual is None else ops.add_residual(x, residual)
        inputs = block.attention_norm(ops.concatenate(residual, self._embedding(batch.token_ids)))
        attended = self.attention(inputs, cache, batch, False, export)
        transformed = self._linear(block.mlp(block.mlp_norm(attended), self._adapter, lora_slots), lora_slots)
        x = self.state(self._norm(ops.add_residual(transformed, ops.clone(residual))), batch, self._last)
        return x, ops.index_select(residual, batch.logits_indices) if self._last else residual


class Zamba2(Decoder):
    """A ``Decoder`` with blocks that layers share."""

    embeds_in_all_stages = True

    def _make_layer(
        self, context: BuildContext, number: int, attention: AttentionFactory, mlp: MLPFactory
    ) -> DecoderLayer:
        if not self.config.has_attention(number):
            return DecoderLayer(context, self.config, number, attention, mlp)
        blocks: dict[str, SharedBlock] = self.__dict__.setdefault("_blocks", {})
        name = block_name(self.config, number)
        if name not in blocks:
            blocks[name] = SharedBlock(context, self.config, name)
        return HybridLayer(context, self.config, number, blocks[name], self._embedding)
