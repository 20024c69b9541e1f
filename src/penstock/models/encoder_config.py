"""Configuration of encoders: what their families read from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core import Code, PenstockError
from penstock.planning.encoders import encoder_prefix, max_encoder_len

from .decoder_options import DecoderOptions

FUNCTIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activation functions of ``config.json`` → ``ops.encoder_ops.FUNCTIONS``."""


@dataclass(frozen=True)
class EncoderConfig:
    """What an encoder has besides a ``ModelConfig``."""

    prefix: str
    """What the names of tensors begin with where the model has a head."""
    function: str
    """Activation function of the feed-forward layers, a name of ``ops.encoder_ops.FUNCTIONS``."""
    type_vocab_size: int
    """Token types (BERT's first and second text); 0 where the model has none."""


def encoder_config(raw: Mapping[str, Any], function: str) -> EncoderConfig:
    """The configuration of an encoder.

    Args:
        raw: ``config.json``.
        function: name of the activation function there.

    Raises ``PenstockError`` (``unsupported``) where it asks for what no code here computes.
    """
    prefix = encoder_prefix(raw)
    assert prefix is not None
    return EncoderConfig(prefix, activation_function(function), int(raw.get("type_vocab_size") or 0))


def activation_function(name: str) -> str:
    """The function of a name in ``config.json``. Raises ``PenstockError`` (``unsupported``) for an unknown one."""
    if name not in FUNCTIONS:
        raise PenstockError(Code.UNSUPPORTED, f"activation {name!r:.40}; known are {', '.join(FUNCTIONS)}", "model")
    return FUNCTIONS[name]


def encoder_fields(raw: Mapping[str, Any], encoder: EncoderConfig) -> dict[str, Any]:
    """Fields of ``dense_config`` that encoders name in another way."""
    return {
        "encoder": encoder,
        "max_model_len": max_encoder_len(raw),
        "tie_word_embeddings": True,
        "has_lm_head": False,
        "num_mtp_layers": 0,
        "options": DecoderOptions(),
    }
