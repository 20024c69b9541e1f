"""Qwen2 (Qwen Team, 2024): Llama with biases of queries, keys and values, and optional sliding windows in later
layers."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, sliding_windows_by_layer_types

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    return dense_config(raw, sliding_windows=read_sliding_windows(raw), qkv_bias=True, output_bias=False)


def read_sliding_windows(raw: ConfigJson) -> tuple[int, ...]:
    """Sliding window of each layer. With ``use_sliding_window``: by ``layer_types``, else from layer
    ``max_window_layers`` on."""
    layers = int(raw["num_hidden_layers"])
    if not raw.get("use_sliding_window", False):
        return (0,) * layers
    if windows := sliding_windows_by_layer_types(raw, layers):
        return windows
    first = raw.get("max_window_layers", layers)
    return tuple(0 if layer < first else raw.get("sliding_window") or 0 for layer in range(layers))


FAMILY = Family(("Qwen2ForCausalLM",), read_config)
