"""Audio input of speech recognition models (Whisper)."""

from __future__ import annotations

import msgspec


class DecodingRules(msgspec.Struct, frozen=True, array_like=True):
    """Decoding constraints of a transcript (Radford et al., 2022, section 4.5, and OpenAI's implementation)."""

    eos: int
    """End-of-text token. All text tokens have smaller ids."""
    forced: tuple[tuple[int, ...], ...] = ()
    """Allowed token ids of each of the first output tokens, of which the most likely one is generated."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never generated."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that are not generated directly after ``forced``."""
    timestamp_begin: int = 0
    """Token of timestamp 0.00; the tokens of later timestamps follow it. 0: no timestamps."""
    max_initial_timestamp: int = 50
    """Largest value of the first timestamp, in steps of 0.02 seconds."""


class Alignment(msgspec.Struct, frozen=True, array_like=True):
    """Request for the end times of a transcript's tokens (nothing is generated).

    The request's prompt holds the prompt and the whole transcript of a window, and its ``pooling`` is set. Its
    embedding is ``[tokens]`` float32: for each token from ``start`` on, the index of the encoder's hidden state (two
    frames each) at which the token ends.
    """

    heads: tuple[tuple[int, int], ...]
    """Layer and head of each alignment head (cross-attention that follows the speech)."""
    start: int
    """Index in the prompt of the transcript's first token."""
    length: int
    """Number of leading hidden states of the window that hold the recording; the remaining states are padding."""


class AudioInput(msgspec.Struct, frozen=True, array_like=True):
    """A window of audio, as log-mel features."""

    features: bytes
    """``[bins, frames]`` float32."""
    bins: int
    """Number of mel bins."""
    frames: int
    """Number of mel frames."""
    rules: DecodingRules
    key: bytes = b""
    """Random id of the audio. Workers may encode it once for all requests with the same id; empty: no sharing."""
    alignment: Alignment | None = None
    """None: the request generates a transcript."""

    @property
    def length(self) -> int:
        """Number of hidden states that the encoder outputs."""
        return self.frames // 2
