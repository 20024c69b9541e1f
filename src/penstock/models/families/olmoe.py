"""OLMoE (Ai2, 2024): Llama with experts in place of every MLP, and norms over all queries and all keys of a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.decoder_options import QKNormOptions
from penstock.checkpoint.experts_config import ExpertsConfig, num_experts_of, read_routing
from penstock.checkpoint.model_config import ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError

from ..registry import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    if raw.get("clip_qkv") is not None:
        raise PenstockError(Code.UNSUPPORTED, "clip_qkv, which limits queries, keys and values", "model")
    num_experts = num_experts_of(raw)
    experts = ExpertsConfig(num_experts, int(raw["intermediate_size"]), read_routing(raw, num_experts))
    options = options_of(raw, qk_norm=QKNormOptions(over="projection"))
    return dense_config(raw, qk_norm=True, options=options, experts=experts)


FAMILY = Family(("OlmoeForCausalLM",), read_config)
