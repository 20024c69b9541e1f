"""Configuration of the audio encoder of models that transcribe speech."""

from __future__ import annotations

from dataclasses import dataclass


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
