"""Transcription of a recording in windows. Each window starts at the end of the last complete segment before it
(Radford et al., 2022, section 3.8, and OpenAI's implementation)."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.core.audio import Alignment, AudioInput, DecodingRules

from .features import LogMelFeatures
from .tokens import SpeechTokens
from .words import split_words

FRAMES_PER_TIME = 2
"""Number of feature frames between two timestamp tokens."""


class _WindowSegment(NamedTuple):
    """Segment of a window."""

    first: int
    """Index of the first token in the window's output."""
    tokens: list[int]
    start: float
    """Seconds after the start of the window."""
    end: float


class Word(NamedTuple):
    """Word of a transcript, with adjacent punctuation."""

    text: str
    start: float
    """Seconds after the start of the recording."""
    end: float


class Segment(NamedTuple):
    """Segment of a transcript."""

    start: float
    """Seconds after the start of the recording."""
    end: float
    text: str
    tokens: list[int]
    seek: int
    """Index of the window's first feature frame."""
    avg_logprob: float | None
    """Mean log probability of the window's tokens; None if unknown."""
    words: Sequence[Word] = ()
    """Words with timestamps, if requested."""

    @property
    def compression_ratio(self) -> float:
        """Size of the text divided by its size compressed with zlib; high for repetitive text."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


@dataclass(frozen=True)
class SpeechTask:
    """Task of a transcription request."""

    translate: bool = False
    """Translate to English."""
    language: str = ""
    """Code of the spoken language; empty: detect it."""
    prompt: Sequence[int] = ()
    """Token ids of text that precedes the transcript."""
    timestamps: bool = False
    """Generate segment timestamps."""
    words: bool = False
    """Compute word timestamps; needs ``timestamps``, and the model's alignment heads."""


class Transcription:
    """Transcribes a recording. Usage: run the model on the result of ``next_window`` and pass its output to ``add``,
    until ``next_window`` returns None. For word timestamps, also run it on the result of ``alignment``, before ``add``.

    Args:
        samples: ``[samples]`` float32 from -1 to 1.
        max_len: size of the model's context in tokens.
        decode: decodes token ids to text.
    """

    def __init__(
        self,
        samples: np.ndarray,
        task: SpeechTask,
        features: LogMelFeatures,
        tokens: SpeechTokens,
        max_len: int,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._features, self._tokens, self._decode = features, tokens, decode
        self._task, self._max_len = task, max_len
        self._mels = features(samples)
        self._num_frames = max(len(samples) // features.hop_length, 1)
        self._frame = features.hop_length / features.sampling_rate
        self.duration = len(samples) / features.sampling_rate
        """Duration of the recording in seconds."""
        self.language = task.language
        """Code of the language; empty until it is detected, and for English-only models."""
        self.segments: list[Segment] = []
        self._timestamps = task.timestamps or len(samples) > features.num_samples
        self._seek = 0
        self._window: tuple[list[int], AudioInput] | None = None

    def next_window(self) -> tuple[list[int], AudioInput, int] | None:
        """Prompt, audio and maximum number of output tokens of the next window; None at the end."""
        if self._seek >= self._num_frames:
            return None
        frames = self._features.num_frames
        window = self._features.window(self._mels, self._seek)
        forced = self._forced()
        known = [choices[0] for choices in forced] if _all_known(forced) else []
        prompt = [*self._previous(), self._tokens.start, *known]
        rules = DecodingRules(
            eos=self._tokens.eos,
            forced=() if _all_known(forced) else tuple(forced),
            suppressed=self._tokens.suppressed,
            suppressed_first=self._tokens.suppressed_first,
            timestamp_begin=self._tokens.timestamp_begin if self._timestamps else 0,
            max_initial_timestamp=self._tokens.max_initial_timestamp,
        )
        max_tokens = min(self._max_len // 2 + len(rules.forced), self._max_len - len(prompt))
        audio = AudioInput(window.tobytes(), self._features.feature_size, frames, rules, secrets.token_bytes(16))
        self._window = prompt, audio
        return prompt, audio, max(max_tokens, 1)

    def alignment(self, token_ids: Sequence[int]) -> tuple[list[int], AudioInput] | None:
        """Prompt and audio of a request for the times of tokens (``Alignment``); None if no word times are needed.

        Args:
            token_ids: the model's output for the last window.
        """
        answer = self._without_end(self._answer(token_ids))
        if not self._task.words or not any(token < self._tokens.eos for token in answer):
            return None
        assert self._window, "call next_window first"
        prompt, audio = self._window
        tokens = [*prompt, *self._without_end(token_ids)]
        length = max(self._size // FRAMES_PER_TIME, 1)
        alignment = Alignment(self._tokens.alignment_heads, len(tokens) - len(answer), length)
        return tokens, msgspec.structs.replace(audio, alignment=alignment)

    def text(self, token_ids: Sequence[int] = ()) -> str:
        """Text of all segments.

        Args:
            token_ids: the model's output so far for the last window. Its complete segments are included; without
                timestamps the whole output is included, and the last character may be incomplete.
        """
        texts = [each.text for each in self.segments]
        if self._timestamps:
            parts, _ = self._split(self._answer(token_ids), whole=False)
            texts += [self._text_of(part.tokens) for part in parts]
        else:
            texts.append(self._text_of(token_ids))
        return "".join(text for text in texts if text.strip()).strip()

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None, times: Sequence[float] = ()
    ) -> None:
        """Add the model's output for the last window.

        Args:
            logprobs: log probabilities of the tokens.
            times: result of the ``alignment`` request.
        """
        tokens = self._answer(token_ids)
        if logprobs is not None:
            logprobs = logprobs[len(token_ids) - len(tokens) :]
        average = sum(logprobs) / len(logprobs) if logprobs else None
        if len(tokens) < len(token_ids):
            codes = {token: code for code, token in self._tokens.languages.items()}
            self.language = self.language or codes.get(token_ids[0], "")
        parts, advance = self._split(tokens, whole=True)
        offset = self._seek * self._frame
        for part in parts:
            text = self._text_of(part.tokens)
            start, end = (round(min(offset + time, self.duration), 2) for time in (part.start, part.end))
            if text.strip():
                words = self._words(part, times) if times else ()
                self.segments.append(Segment(start, end, text, part.tokens, self._seek, average, words))
        self._seek += advance

    def _words(self, part: _WindowSegment, times: Sequence[float]) -> list[Word]:
        """Words of a segment.

        Args:
            times: times of the window's tokens, as in ``Alignment``.
        """
        offset, step = self._seek * self._frame, FRAMES_PER_TIME * self._frame
        seconds = [round(min(offset + time * step, self.duration), 2) for time in (0.0, *times)]
        positions = [i for i, token in enumerate(part.tokens, part.first) if token < self._tokens.eos]
        text_tokens = [token for token in part.tokens if token < self._tokens.eos]
        return [
            Word(word.text, seconds[positions[word.first]], seconds[positions[word.end - 1] + 1])
            for word in split_words(text_tokens, self._decode, self.language)
        ]

    def _answer(self, token_ids: Sequence[int]) -> list[int]:
        """Output without the forced tokens at its beginning."""
        forced = self._forced()
        return list(token_ids if _all_known(forced) else token_ids[len(forced) :])

    def _split(self, tokens: list[int], whole: bool) -> tuple[list[_WindowSegment], int]:
        """Split a window into segments; returns the segments, and the number of frames to the next window's start.

        Args:
            whole: the output is complete; otherwise the last segment is left out.
        """
        tokens, size = self._without_end(tokens), self._size
        begin, step = self._tokens.timestamp_begin, FRAMES_PER_TIME * self._frame
        is_time = [token >= begin for token in tokens]
        ends = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]] if self._timestamps else []
        if not ends:
            times = [token - begin for token in tokens if token > begin] if self._timestamps else []
            end = times[-1] * step if times else size * self._frame
            return [_WindowSegment(0, tokens, 0.0, end)] if whole else [], size
        ends_with_time = whole and is_time[-2:] == [False, True]
        last = (tokens[ends[-1] - 1] - begin) * FRAMES_PER_TIME
        bounds = [0, *ends, len(tokens)] if ends_with_time else [0, *ends]
        parts = [(start, tokens[start:end]) for start, end in pairwise(bounds)]
        advance = size if ends_with_time or last <= 0 else last
        return [_WindowSegment(i, ids, (ids[0] - begin) * step, (ids[-1] - begin) * step) for i, ids in parts], advance

    @property
    def _size(self) -> int:
        """Number of frames of the recording in the last window, without padding."""
        return min(self._features.num_frames, self._num_frames - self._seek)

    def _without_end(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token != self._tokens.eos]

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, without timestamps and other special tokens."""
        return self._decode([token for token in token_ids if token < self._tokens.eos])

    def _forced(self) -> list[tuple[int, ...]]:
        """Choices for each of the forced tokens after ``<|startoftranscript|>``: language, task, no timestamps."""
        tokens, result = self._tokens, []
        if tokens.languages:
            known = tokens.languages.get(self.language)
            result.append((known,) if known is not None else tuple(tokens.languages.values()))
        if tokens.tasks:
            result.append((tokens.tasks["translate" if self._task.translate else "transcribe"],))
        return result if self._timestamps else [*result, (tokens.no_timestamps,)]

    def _previous(self) -> list[int]:
        """Tokens of the text before the first window, truncated to half of the context; empty for other windows."""
        if self._seek or not self._task.prompt or self._tokens.previous is None:
            return []
        return [self._tokens.previous, *self._task.prompt[-(self._max_len // 2 - 1) :]]


def _all_known(forced: Sequence[Sequence[int]]) -> bool:
    """True if there is only one choice for each forced token, so that the prompt can contain them."""
    return all(len(choices) == 1 for choices in forced)
