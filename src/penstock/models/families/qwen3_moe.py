"""Qwen3-MoE (Qwen Team, 2025): Qwen3 with experts in place of the MLP of most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.experts_config import ExpertsConfig, dense_layers_by_step, num_experts_of, read_routing
from penstock.checkpoint.model_config import ModelConfig

from ..registry import Family
from . import qwen3


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    num_experts = num_experts_of(raw)
    experts = ExpertsConfig(
        num_experts,
        int(raw["moe_intermediate_size"]),
        read_routing(raw, num_experts),
        dense_layers=dense_layers_by_step(raw),
    )
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    windows = (window,) * int(raw["num_hidden_layers"])  # of all layers, whatever layer_types says
    return replace(qwen3.read_config(raw), experts=experts, sliding_windows=windows)


FAMILY = Family(("Qwen3MoeForCausalLM",), read_config)
