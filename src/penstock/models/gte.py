"""GTE (Zhang et al., 2024): BERT with rotary positions and gated feed-forward layers."""

from __future__ import annotations

from penstock.checkpoint.encoders import SUFFIXES
from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BuildContext, GatedMLP

from .bert import build_classifier, build_encoder, read_bert_config
from .encoder import Encoder
from .registry import Family
from .stored import Stored, find_fused, part_of


def find_stored(config: ModelConfig, name: str) -> Stored:
    """``Family.find_stored``: ``qkv_proj``, and ``up_gate_proj`` with the gate behind."""
    parent, _, last = name.rpartition(".")
    if last in ("gate_proj", "up_proj"):
        return part_of(f"{parent}.up_gate_proj", [config.intermediate_size] * 2, last == "gate_proj")
    return find_fused(config, name)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Encoder:
    rope = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    def mlp(own: str) -> GatedMLP:
        sizes, activation = (config.hidden_size, config.intermediate_size), config.options.activation
        return GatedMLP(context, f"{own}.mlp", *sizes, activation=activation, down_bias=True)

    return build_encoder(context, config, ("attn_ln", "mlp_ln"), mlp, rope)


FAMILY = Family(
    architectures=tuple(f"Gte{end}" for end in SUFFIXES),
    read_config=read_bert_config,
    build=build,
    build_classifier=build_classifier,
    find_stored=find_stored,
)
