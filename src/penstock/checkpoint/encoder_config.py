"""Configuration of encoders: what their families read from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .encoders import encoder_prefix, max_encoder_len


@dataclass(frozen=True)
class EncoderConfig:
    """What an encoder has besides a ``ModelConfig``."""

    prefix: str
    """What the names of tensors begin with where the model has a head."""
    type_vocab_size: int
    """Token types (BERT's first and second text); 0 where the model has none."""


def encoder_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``dense_config`` that encoders name in another way."""
    prefix = encoder_prefix(raw)
    assert prefix is not None
    return {
        "encoder": EncoderConfig(prefix, int(raw.get("type_vocab_size") or 0)),
        "max_model_len": max_encoder_len(raw),
        "tie_word_embeddings": True,
        "has_lm_head": False,
        "num_mtp_layers": 0,
    }
