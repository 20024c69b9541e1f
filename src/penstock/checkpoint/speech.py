"""Models that transcribe speech: their ``config.json``, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WHISPER = "WhisperForConditionalGeneration"
DECODER = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
    "max_position_embeddings": "max_target_positions",
}
"""Names that decoders have → Whisper's. Its own ``num_hidden_layers`` is of the encoder."""


def with_decoder_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A complete ``config.json`` of Whisper with the fields of its decoder by the usual names; others as they are."""
    if not is_speech(config):
        return config
    return config | {name: config[source] for name, source in DECODER.items()} | {"num_key_value_heads": None}


def is_speech(config: Mapping[str, Any]) -> bool:
    """Whether a model transcribes speech."""
    return WHISPER in (config.get("architectures") or ())


def encoder_weights(config: Mapping[str, Any]) -> int:
    """Parameters of the encoder's matrices, and of the decoder's positions."""
    size, positions = int(config["d_model"]), int(config["max_source_positions"]) + int(config["max_target_positions"])
    convolutions = 3 * size * (int(config["num_mel_bins"]) + size)
    layer = 4 * size**2 + 2 * size * int(config["encoder_ffn_dim"])
    return convolutions + positions * size + int(config["encoder_layers"]) * layer


def cross_attention_weights(config: Mapping[str, Any]) -> int:
    """Parameters of a decoder layer's attention to the audio."""
    return 4 * int(config["hidden_size"]) ** 2
