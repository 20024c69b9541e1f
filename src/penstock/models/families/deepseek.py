"""DeepSeek-V2 (DeepSeek-AI, 2024), DeepSeek-V3 and R1 (2024, 2025): multi-head latent attention and mixture of experts.
Kimi-K2 has the architecture of V3."""

from dataclasses import replace

from penstock.checkpoint.experts_config import read_deepseek_experts
from penstock.checkpoint.latent_config import read_latent_config
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
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


FAMILY = Family(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), read_config)
