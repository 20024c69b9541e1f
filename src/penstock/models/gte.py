"""GTE (Zhang et al., 2024): BERT with rotary positions and gated feed-forward layers."""

from __future__ import annotations

from penstock.checkpoint.encoders import SUFFIXES
from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BidirectionalAttention, BuildContext, GatedMLP, LayerNorm

from .bert import EMBEDDINGS, build_classifier, read_bert_config
from .encoder import Encoder, PostNormLayer, module_name, position_and_type_table
from .registry import Family
from .stored import Stored, find_fused, part_of


def find_stored(config: ModelConfig, name: str) -> Stored:
    """``Family.find_stored``: ``qkv_proj``, and ``up_gate_proj`` with the gate behind."""
    parent, _, last = name.rpartition(".")
    if last in ("gate_proj", "up_proj"):
        return part_of(f"{parent}.up_gate_proj", [config.intermediate_size] * 2, last == "gate_proj")
    return find_fused(config, name)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Encoder:
    name = module_name(context, config, EMBEDDINGS)
    size, eps = config.hidden_size, config.rms_norm_eps
    rope = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    def layer(number: int) -> PostNormLayer:
        own = f"{name}encoder.layer.{number}"
        return PostNormLayer(
            context.ops,
            BidirectionalAttention(
                context,
                f"{own}.attention",
                hidden_size=size,
                num_heads=config.num_heads,
                head_dim=config.head_dim,
                rope=rope,
            ),
            LayerNorm(context, f"{own}.attn_ln", size, eps, bias=True),
            GatedMLP(
                context,
                f"{own}.mlp",
                size,
                config.intermediate_size,
                activation=config.options.activation,
                down_bias=True,
            ),
            LayerNorm(context, f"{own}.mlp_ln", size, eps, bias=True),
            last=number == config.num_layers - 1,
        )

    return Encoder(
        context,
        config,
        embeddings=f"{name}embeddings.word_embeddings",
        embedding_norm=f"{name}embeddings.LayerNorm",
        norm_bias=True,
        added=position_and_type_table(context, config, f"{name}embeddings", learned_positions=False),
        layer=layer,
    )


FAMILY = Family(
    architectures=tuple(f"Gte{end}" for end in SUFFIXES),
    read_config=read_bert_config,
    build=build,
    build_classifier=build_classifier,
    find_stored=find_stored,
)
