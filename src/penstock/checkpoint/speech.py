"""``config.json`` of models that transcribe speech."""

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
"""Names that decoders have → Whisper's. Its own ``num_hidden_layers`` is of the encoder."""


def with_decoder_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A complete ``config.json`` of Whisper with the fields of its decoder by the usual names; others as they are."""
    if not is_speech(config):
        return config
    return config | {name: config[source] for name, source in DECODER.items()} | {"num_key_value_heads": None}


def is_speech(config: Mapping[str, Any]) -> bool:
    """Whether a model transcribes speech."""
    return WHISPER in (config.get("architectures") or ())


@dataclass(frozen=True)
class SpeechConfig:
    """The encoder of audio; it is as wide as the decoder."""

    num_bins: int
    """Mel bins of a frame."""
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_positions: int
    """Hidden states of a window of audio, one for each two frames."""
    median_filter_width: int = 7
    """Hidden states over which attention is smoothed for times of tokens; odd."""

    @property
    def num_frames(self) -> int:
        """Frames of a window."""
        return 2 * self.num_positions
