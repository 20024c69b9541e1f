"""DeepSeek-V3.2 (DeepSeek-AI, 2025) and GLM-5 (Zhipu AI, 2026): DeepSeek-V3 with sparse attention."""

from dataclasses import replace

from penstock.checkpoint.experts_config import read_deepseek_experts
from penstock.checkpoint.latent_config import layers_without_indexer, read_indexer_config, read_latent_config
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    config = dense_config(raw, num_kv_heads=1, mlp_bias=False)
    latent = read_latent_config(raw, config.rope_parameters, rope_interleave=True)
    is_glm = config.architecture == "GlmMoeDsaForCausalLM"
    shared = layers_without_indexer(raw) if is_glm else frozenset[int]()
    indexer = read_indexer_config(raw, latent, interleave=is_glm, shared_layers=shared)
    if kinds := raw.get("mlp_layer_types"):
        if len(kinds) != config.num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
            message = f"one of dense and sparse for each of {config.num_layers} layers"
            raise ValueError(f"mlp_layer_types is {kinds!r:.80}; it must have {message}")
        raw = {**raw, "moe_layer_freq": [int(kind == "sparse") for kind in kinds]}
    return replace(
        config,
        head_dim=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        latent=replace(latent, indexer=indexer),
        experts=read_deepseek_experts(raw),
    )


FAMILY = Family(("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), read_config)
