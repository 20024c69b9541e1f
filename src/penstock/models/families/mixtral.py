"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer."""

from dataclasses import replace

from penstock.checkpoint.experts_config import read_experts
from penstock.checkpoint.model_config import ConfigJson, ModelConfig

from ..registry import Family
from . import mistral


def read_config(raw: ConfigJson) -> ModelConfig:
    config = mistral.read_config(raw)
    experts = read_experts(
        raw,
        "intermediate_size",
        {"renormalize": True},
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return replace(config, experts=experts)


FAMILY = Family(("MixtralForCausalLM",), read_config)
