"""Qwen2-MoE (Qwen Team, 2024): Qwen2 with a mixture of experts and one shared expert in most layers."""

from dataclasses import replace

from penstock.checkpoint.experts_config import (
    dense_layers_by_step,
    read_experts,
)
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, sliding_windows_by_layer_types

from ..registry import Family
from . import qwen2


def read_config(raw: ConfigJson) -> ModelConfig:
    experts = read_experts(
        raw,
        "moe_intermediate_size",
        dense_layers=dense_layers_by_step(raw),
        shared_size=int(raw["shared_expert_intermediate_size"]),
        shared_name="shared_expert",
        shared_gate="shared_expert_gate",
    )
    bias = bool(raw.get("qkv_bias", True))
    return replace(qwen2.read_config(raw), qkv_bias=bias, experts=experts, sliding_windows=_sliding_windows(raw))


def _sliding_windows(raw: ConfigJson) -> tuple[int, ...]:
    """Sliding window of each layer. With ``use_sliding_window``: by ``layer_types``, else in every second layer before
    ``max_window_layers`` (unlike Qwen2)."""
    layers, window = int(raw["num_hidden_layers"]), int(raw.get("sliding_window") or 0)
    if not raw.get("use_sliding_window"):
        return (0,) * layers
    if windows := sliding_windows_by_layer_types(raw, layers):
        return windows
    first = int(raw.get("max_window_layers") or 0)
    return tuple(window if layer % 2 == 0 and layer < first else 0 for layer in range(layers))


FAMILY = Family(("Qwen2MoeForCausalLM",), read_config)
