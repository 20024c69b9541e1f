"""DeepSeek-V2 (DeepSeek-AI, 2024), DeepSeek-V3 and R1 (2024, 2025): multi-head latent attention and
mixture of experts. Kimi-K2 is a V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.checkpoint.experts_config import read_deepseek_experts
from penstock.checkpoint.latent_config import read_latent_config
from penstock.checkpoint.model_config import ModelConfig, dense_config
from penstock.layers import AttentionLayer, BuildContext, LatentAttention

from ..decoder import build_decoder
from ..experts import mixture_of_experts
from ..registry import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    config = dense_config(raw, num_kv_heads=1)
    is_v2 = config.architecture == "DeepseekV2ForCausalLM"
    mlp_bias = config.mlp_bias and is_v2
    latent = read_latent_config(raw, config.rope_parameters, is_v2 or bool(raw.get("rope_interleave", True)))
    experts = read_deepseek_experts(raw, "greedy" if is_v2 else "noaux_tc")
    return replace(
        config,
        head_dim=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        mlp_bias=mlp_bias,
        latent=latent,
        experts=replace(experts, shared_bias=mlp_bias) if experts else None,
    )


def latent_attention(context: BuildContext, config: ModelConfig, layer: int, name: str) -> AttentionLayer:
    """``LatentAttention`` with the sizes of the configuration."""
    latent = config.latent
    assert latent
    return LatentAttention(
        context,
        name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        q_rank=latent.q_lora_rank,
        latent=latent.kv_lora_rank,
        nope_dim=latent.qk_nope_head_dim,
        rope_dim=latent.qk_rope_head_dim,
        value_dim=latent.v_head_dim,
        rope=context.rope_table(latent.qk_rope_head_dim, config.rope_parameters, config.max_position_embeddings),
        interleaved=latent.rope_interleave,
        scale=latent.scale,
        bias=config.output_bias,
    )


FAMILY = Family(
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    read_config=read_config,
    build=partial(build_decoder, attention=latent_attention, mlp=mixture_of_experts),
)
