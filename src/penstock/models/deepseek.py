"""DeepSeek-V2 (DeepSeek-AI, 2024), DeepSeek-V3 and R1 (2024, 2025): multi-head latent attention. Kimi-K2 is a V3."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.core import Code, PenstockError
from penstock.layers import AttentionLayer, BuildContext, LatentAttention

from .config import ModelConfig, dense_config
from .decoder import build_decoder
from .latent_config import read_latent_config
from .registry import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    config = dense_config(raw, num_kv_heads=1)
    if raw.get("n_routed_experts") and int(raw.get("first_k_dense_replace") or 0) < config.num_layers:
        raise PenstockError(Code.UNSUPPORTED, f"layers of experts in {config.architecture} are not supported", "model")
    interleave = True if config.architecture == "DeepseekV2ForCausalLM" else raw.get("rope_interleave", True)
    latent = read_latent_config(raw, config.rope_parameters, bool(interleave))
    mlp_bias = config.mlp_bias and config.architecture == "DeepseekV2ForCausalLM"
    head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    return dense_config(raw, num_kv_heads=1, head_dim=head_dim, mlp_bias=mlp_bias, latent=latent)


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
    build=partial(build_decoder, attention=latent_attention),
)
