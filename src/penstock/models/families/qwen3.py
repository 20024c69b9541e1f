"""Qwen3 (Qwen Team, 2025): Qwen2 with q/k norms per head instead of biases."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config

from ..registry import Family
from .qwen2 import read_sliding_windows


def read_config(raw: ConfigJson) -> ModelConfig:
    return dense_config(raw, sliding_windows=read_sliding_windows(raw), qk_norm=True)


FAMILY = Family(("Qwen3ForCausalLM",), read_config)
