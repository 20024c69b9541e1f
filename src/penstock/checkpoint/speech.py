"""``config.json`` of speech recognition models (Whisper)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHISPER = "WhisperForConditionalGeneration"
DECODER = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
    "max_position_embeddings": "max_target_positions",
}
"""Usual field names of decoders → Whisper's names. ``num_hidden_layers`` in Whisper's file counts encoder layers."""


def with_decoder_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Whisper's ``config.json`` with the fields of its decoder under the usual names; unmodified for other models."""
    if not is_speech(config):
        return config
    return config | {name: config[source] for name, source in DECODER.items()} | {"num_key_value_heads": None}


def is_speech(config: Mapping[str, Any]) -> bool:
    """Whether a model transcribes speech."""
    return WHISPER in (config.get("architectures") or ())


@dataclass(frozen=True)
class SpeechConfig:
    """Configuration of the audio encoder. Its hidden size is that of the decoder."""

    num_bins: int
    """Number of mel bins per frame."""
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_positions: int
    """Number of hidden states per window of audio, one for every two frames."""
    median_filter_width: int = 7
    """Width, in hidden states, of the filter that smooths attention for token timestamps; odd."""

    @property
    def num_frames(self) -> int:
        """Number of frames per window."""
        return 2 * self.num_positions
