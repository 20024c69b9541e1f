"""Qwen3-MoE (Qwen Team, 2025): Qwen3 with a mixture of experts in most layers."""

from dataclasses import replace

from penstock.checkpoint.experts_config import (
    dense_layers_by_step,
    read_experts,
)
from penstock.checkpoint.model_config import ConfigJson, ModelConfig

from ..registry import Family
from . import qwen3


def read_config(raw: ConfigJson) -> ModelConfig:
    experts = read_experts(
        raw,
        "moe_intermediate_size",
        dense_layers=dense_layers_by_step(raw),
    )
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    windows = (window,) * int(raw["num_hidden_layers"])  # layer_types is ignored: all layers have the same window
    return replace(qwen3.read_config(raw), experts=experts, sliding_windows=windows)


FAMILY = Family(("Qwen3MoeForCausalLM",), read_config)
