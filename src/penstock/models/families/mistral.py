"""Mistral (Jiang et al., 2023): Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.model_config import ModelConfig, dense_config, sliding_windows_by_layer_types

from ..registry import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    layers, window = int(raw["num_hidden_layers"]), raw.get("sliding_window") or 0
    return dense_config(raw, sliding_windows=sliding_windows_by_layer_types(raw, layers) or (window,) * layers)


FAMILY = Family(("MistralForCausalLM",), read_config)
