"""Qwen3 (Qwen Team, 2025): Qwen2 with RMS norms on the queries and keys of each head in place of biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.model_config import ModelConfig, dense_config

from ..registry import Family
from .qwen2 import read_sliding_windows


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    return dense_config(raw, sliding_windows=read_sliding_windows(raw), qk_norm=True)


FAMILY = Family(("Qwen3ForCausalLM",), read_config)
