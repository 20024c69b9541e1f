"""GTE (Zhang et al., 2024): BERT with rotary embedding and gated MLPs."""

from __future__ import annotations

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BuildContext, GatedMLP

from .bert import build_encoder
from .encoder import Encoder


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Encoder:
    rope = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    def mlp(layer_name: str) -> GatedMLP:
        sizes, activation = (config.hidden_size, config.intermediate_size), config.options.activation
        return GatedMLP(context, f"{layer_name}.mlp", *sizes, activation=activation, down_bias=True)

    return build_encoder(context, config, ("attn_ln", "mlp_ln"), mlp, rope)
