"""Mistral (Jiang et al., 2023): Llama with a sliding window in every layer."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, sliding_windows_by_layer_types

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    layers, window = int(raw["num_hidden_layers"]), raw.get("sliding_window") or 0
    return dense_config(raw, sliding_windows=sliding_windows_by_layer_types(raw, layers) or (window,) * layers)


FAMILY = Family(("MistralForCausalLM",), read_config)
