"""Granite 3 (IBM, 2024): Llama with factors of embedding, attention, residual stream and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, dense_config, options_of
from .decoder import build_decoder
from .registry import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    embedding, attention, residual, logits = (
        float(raw.get(name) or 1)
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    options = options_of(
        raw,
        embedding_scale=embedding,
        attention_scale=attention,
        residual_scale=residual,
        logit_scale=1 / logits,
    )
    return dense_config(raw, options=options)


FAMILY = Family(("GraniteForCausalLM",), read_config=read_config, build=build_decoder)
