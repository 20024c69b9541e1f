"""ERNIE 4.5 (Baidu, 2025), dense: Llama with neighbours in a head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, dense_config, options_of
from .decoder import build_decoder
from .registry import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("use_bias"))
    options = options_of(raw, rope_interleaved=True)
    return dense_config(raw, qkv_bias=bias, output_bias=bias, mlp_bias=bias, options=options)


FAMILY = Family(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), read_config=read_config, build=build_decoder)
