"""Hunyuan (Tencent, 2025), dense: Llama with norms on rotated queries and keys, and a base of the rotary positions that
a factor stretches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.planning.model_size import rope_parameters_of

from .config import ModelConfig, dense_config, options_of
from .decoder import build_decoder
from .decoder_options import QKNormOptions
from .registry import Family
from .weights.renamed import Stored

NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
"""Of norms in the checkpoint."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    options = options_of(raw, qk_norm=QKNormOptions(after_rope=True))
    config, rope = dense_config(raw, qk_norm=True, mlp_bias=False, options=options), rope_parameters_of(raw)
    if rope["rope_type"] != "dynamic" or not rope.get("alpha"):
        return config
    stretched = rope["rope_theta"] * float(rope["alpha"]) ** (config.head_dim / (config.head_dim - 2))
    return replace(
        config,
        rope_parameters={"rope_type": "default", "rope_theta": stretched},
        max_model_len=config.max_position_embeddings,
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """``Family.find_stored``."""
    parent, _, last = name.rpartition(".")
    return Stored(f"{parent}.{NAMES[last]}") if last in NAMES else Stored(name)


FAMILY = Family(("HunYuanDenseV1ForCausalLM",), read_config=read_config, build=build_decoder, find_stored=find_stored)
