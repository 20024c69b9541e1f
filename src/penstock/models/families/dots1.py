"""dots.llm1 (rednote, 2025): Qwen3's attention, and DeepSeek-V3's experts."""

from penstock.checkpoint.experts_config import read_deepseek_experts
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, sliding_windows_by_layer_types

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    layers, first = int(raw["num_hidden_layers"]), int(raw.get("max_window_layers") or 0)
    windows = sliding_windows_by_layer_types(raw, layers)
    if windows is None:
        window = int(raw.get("sliding_window") or 0)
        windows = tuple(window if layer >= first else 0 for layer in range(layers))
    return dense_config(raw, qk_norm=True, sliding_windows=windows, experts=read_deepseek_experts(raw))


FAMILY = Family(("Dots1ForCausalLM",), read_config)
