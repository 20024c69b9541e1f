"""Llama 4 (Meta, 2025), the language model: attention in chunks, layers without rotary positions whose queries grow
with the position, and experts that read their input times the router's score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import Attention, AttentionLayer, BuildContext, MLPLayer, QKNormLayers
from penstock.layers.norm import UnweightedRMSNorm

from . import experts
from .decoder import Decoder
from .layer import dense_mlp


def query_factors(raw: Mapping[str, Any], max_len: int, head_dim: int) -> Tensor:
    """``Attention``'s ``query_factors`` of layers without rotary positions: attention's temperature falls with the
    logarithm of the position (Nakanishi, 2025)."""
    floor, scale = float(raw.get("floor_scale") or 8192), float(raw.get("attn_scale") or 0.1)
    positions = torch.arange(max_len, dtype=torch.float32)
    factors = torch.log1p(torch.floor((positions + 1.0) / floor)) * scale + 1.0
    half = factors[:, None].expand(-1, head_dim // 2)
    return torch.cat((half, torch.zeros_like(half)), -1)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Decoder:
    tuned = config.raw.get("attn_temperature_tuning", True)
    factors = query_factors(config.raw, context.max_len, config.head_dim).to(context.device) if tuned else None

    def attention(context: BuildContext, config: ModelConfig, layer: int, name: str) -> AttentionLayer:
        rope = config.rope_of(layer)
        norm = UnweightedRMSNorm(context, config.head_dim, config.rms_norm_eps)
        window = config.sliding_windows[layer]
        return Attention(
            context,
            name,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope=torch.empty(context.max_len, 0, device=context.device)
            if rope is None
            else context.rope_table(config.head_dim, rope, config.max_position_embeddings),
            window=window,
            chunked=window > 0,
            query_factors=factors if rope is None else None,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm_layers=QKNormLayers(norm, norm, after_rope=True) if config.qk_norm and rope else None,
            rope_interleaved=True,
        )

    return Decoder(context, config, num_mtp_heads, attention=attention, mlp=feed_forward)


def feed_forward(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
    """``MLPFactory`` under Llama 4's names."""
    assert config.experts
    if layer in config.experts.dense_layers:
        return dense_mlp(context, config, layer, f"{name.removesuffix('mlp')}feed_forward")
    return experts.feed_forward(context, config, layer, name)
