"""GTE (Zhang et al., 2024): BERT with rotary positions and gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.layers import BidirectionalAttention, BuildContext, EncoderMLP, LayerNorm
from penstock.planning.encoders import SUFFIXES

from .bert import EMBEDDINGS, build_classifier
from .config import ModelConfig, dense_config
from .encoder import Encoder, PostNormLayer, module_name, position_and_type_table
from .encoder_config import encoder_config, encoder_fields
from .registry import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    encoder = encoder_config(raw, str(raw.get("hidden_act", "gelu")))
    eps = float(raw.get("layer_norm_eps") or 1e-12)
    return dense_config(raw, **encoder_fields(raw, encoder), rms_norm_eps=eps)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Encoder:
    name = module_name(context, config, EMBEDDINGS)
    assert config.encoder
    size, function, eps = config.hidden_size, config.encoder.function, config.rms_norm_eps
    rope = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    def layer(number: int) -> PostNormLayer:
        own = f"{name}encoder.layer.{number}"
        return PostNormLayer(
            context.ops,
            BidirectionalAttention(
                context,
                [f"{own}.attention.qkv_proj"] * 3,
                f"{own}.attention.o_proj",
                hidden_size=size,
                num_heads=config.num_heads,
                head_dim=config.head_dim,
                rope=rope,
            ),
            LayerNorm(context, f"{own}.attn_ln", size, eps, bias=True),
            EncoderMLP(
                context,
                [f"{own}.mlp.up_gate_proj"] * 2,
                f"{own}.mlp.down_proj",
                hidden_size=size,
                intermediate_size=config.intermediate_size,
                function=function,
                bias=(False, True),
                gate_last=True,
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
    read_config=read_config,
    build=build,
    build_classifier=build_classifier,
)
