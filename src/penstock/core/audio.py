"""Audio of a request, for models that transcribe it."""

from __future__ import annotations

import msgspec


class DecodingRules(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens a transcript may have (Radford et al., 2022, section 4.5, and OpenAI's implementation)."""

    eos: int
    """Token that ends a window; all tokens of text come before it."""
    forced: tuple[tuple[int, ...], ...] = ()
    """Of each of the first output tokens, which ones it is chosen from: the likeliest of them."""
    suppressed: tuple[int, ...] = ()
    """Tokens that never occur."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that do not come first, after ``forced``."""
    timestamp_begin: int = 0
    """The token of the time 0, after which those of later times follow; 0 for transcripts without times."""
    max_initial_timestamp: int = 50
    """Largest first time, in steps of 0.02 seconds."""


class Alignment(msgspec.Struct, frozen=True, array_like=True):
    """Ask for the times of a transcript's tokens, in place of more tokens: the request's prompt is the prompt and the
    whole transcript of a window, and its ``pooling`` is set. Its embedding is ``[tokens]`` float32: the hidden state of
    the audio, two frames each, at which each token from ``start`` on has ended."""

    heads: tuple[tuple[int, int], ...]
    """Layer and head of each attention head whose attention to the audio follows the speech."""
    start: int
    """Index in the prompt of the transcript's first token."""
    length: int
    """Leading hidden states of the window that are of the recording, and not of the silence after its end."""


class AudioInput(msgspec.Struct, frozen=True, array_like=True):
    """A window of audio, as log-mel features."""

    features: bytes
    """``[bins, frames]`` float32."""
    bins: int
    frames: int
    rules: DecodingRules
    key: bytes = b""
    """Random bytes that requests with the same audio share, of which workers may encode it once; empty for none."""
    alignment: Alignment | None = None
    """None for a request that generates a transcript."""

    @property
    def length(self) -> int:
        """Hidden states that an encoder makes of it."""
        return self.frames // 2
