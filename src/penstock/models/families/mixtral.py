"""Mixtral (Jiang et al., 2024): Mistral with experts in place of every MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.experts_config import ExpertsConfig, num_experts_of, read_routing
from penstock.checkpoint.model_config import ModelConfig

from ..registry import Family
from . import mistral


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    num_experts, config = num_experts_of(raw), mistral.read_config(raw)
    experts = ExpertsConfig(
        num_experts,
        config.intermediate_size,
        read_routing(raw, num_experts, renormalize=True),
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return replace(config, experts=experts)


FAMILY = Family(("MixtralForCausalLM",), read_config)
