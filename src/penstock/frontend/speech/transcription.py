"""Transcription of a recording, window by window, each from where the last whole segment of the one before ends
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
"""Frames of features between two tokens of times."""


class _Part(NamedTuple):
    """A segment of a window, in its seconds."""

    first: int
    """Index of its first token in the window's answer."""
    tokens: list[int]
    start: float
    end: float


class Word(NamedTuple):
    """A word of a transcript, with its punctuation."""

    text: str
    start: float
    """Seconds."""
    end: float


class Segment(NamedTuple):
    """A part of a transcript."""

    start: float
    """Seconds."""
    end: float
    text: str
    tokens: list[int]
    seek: int
    """Frame at which its window begins."""
    avg_logprob: float | None
    """Of its window's tokens; None where it is not known."""
    words: Sequence[Word] = ()
    """Empty unless they were asked for."""

    @property
    def compression_ratio(self) -> float:
        """Bytes of its text for one of zlib's; a high one tells of repetition."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


@dataclass(frozen=True)
class SpeechTask:
    """What is asked for."""

    translate: bool = False
    """Into English."""
    language: str = ""
    """Code of the language that is spoken; empty to have it detected."""
    prompt: Sequence[int] = ()
    """Tokens of text that might have come before."""
    timestamps: bool = False
    words: bool = False
    """Times of words, which take ``timestamps``, and alignment heads of the model."""


class Transcription:
    """A recording's transcript: give the model what ``next_window`` returns, and ``add`` what it answers, until there
    is no more. For times of words, give it what ``alignment`` returns in between.

    Args:
        samples: ``[samples]`` float32.
        max_len: tokens of the model's context.
        decode: tokens to text.
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
        """Seconds."""
        self.language = task.language
        """Code of the language, once it is detected; empty before, and of models for English."""
        self.segments: list[Segment] = []
        self._timestamps = task.timestamps or len(samples) > features.num_samples
        self._seek = 0
        self._window: tuple[list[int], AudioInput] | None = None

    def next_window(self) -> tuple[list[int], AudioInput, int] | None:
        """The prompt and the audio of the next window, and the most tokens that the model may answer; None at the
        end."""
        if self._seek >= self._num_frames:
            return None
        frames = self._features.num_frames
        window = self._features.window(self._mels, self._seek)
        forced = self._forced()
        known = [few[0] for few in forced] if _all_known(forced) else []
        prompt = [*self._previous(), self._tokens.start, *known]
        rules = DecodingRules(
            eos=self._tokens.eos,
            forced=() if _all_known(forced) else tuple(forced),
            suppressed=self._tokens.suppressed,
            suppressed_first=self._tokens.suppressed_first,
            timestamp_begin=self._tokens.timestamp_begin if self._timestamps else 0,
            max_initial_timestamp=self._tokens.max_initial_timestamp,
        )
        most = min(self._max_len // 2 + len(rules.forced), self._max_len - len(prompt))
        audio = AudioInput(window.tobytes(), self._features.feature_size, frames, rules, secrets.token_bytes(16))
        self._window = prompt, audio
        return prompt, audio, max(most, 1)

    def alignment(self, token_ids: Sequence[int]) -> tuple[list[int], AudioInput] | None:
        """The prompt and audio of a request for the times of tokens (``Alignment``); None where they are not needed.

        Args:
            token_ids: the model's answer to the last window.
        """
        answer = self._without_end(self._answer(token_ids))
        if not self._task.words or not any(token < self._tokens.eos for token in answer):
            return None
        assert self._window, "call next_window first"
        prompt, audio = self._window
        tokens = [*prompt, *self._without_end(token_ids)]
        length = max(self._size // FRAMES_PER_TIME, 1)
        asked = Alignment(self._tokens.alignment_heads, len(tokens) - len(answer), length)
        return tokens, msgspec.structs.replace(audio, alignment=asked)

    def text(self, token_ids: Sequence[int] = ()) -> str:
        """The text of all segments.

        Args:
            token_ids: of the model's answer to the last window, so far: with those of its segments that will not
                change. Its end may lack bytes of a character.
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
        """The model's answer to the last window.

        Args:
            logprobs: of the tokens.
            times: answer to ``alignment``.
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

    def _words(self, part: _Part, times: Sequence[float]) -> list[Word]:
        """The words of a segment.

        Args:
            times: of the window's tokens, as of ``Alignment``.
        """
        offset, step = self._seek * self._frame, FRAMES_PER_TIME * self._frame
        seconds = [round(min(offset + time * step, self.duration), 2) for time in (0.0, *times)]
        places = [i for i, token in enumerate(part.tokens, part.first) if token < self._tokens.eos]
        texts = [token for token in part.tokens if token < self._tokens.eos]
        return [
            Word(word.text, seconds[places[word.first]], seconds[places[word.end - 1] + 1])
            for word in split_words(texts, self._decode, self.language)
        ]

    def _answer(self, token_ids: Sequence[int]) -> list[int]:
        """What comes after the forced tokens."""
        forced = self._forced()
        return list(token_ids if _all_known(forced) else token_ids[len(forced) :])

    def _split(self, tokens: list[int], whole: bool) -> tuple[list[_Part], int]:
        """The segments of a window, and the frames from its beginning to the next one's.

        Args:
            whole: whether the tokens are all; otherwise the last segment is left out.
        """
        tokens, size = self._without_end(tokens), self._size
        begin, step = self._tokens.timestamp_begin, FRAMES_PER_TIME * self._frame
        is_time = [token >= begin for token in tokens]
        ends = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]] if self._timestamps else []
        if not ends:
            times = [token - begin for token in tokens if token > begin] if self._timestamps else []
            end = times[-1] * step if times else size * self._frame
            return [_Part(0, tokens, 0.0, end)] if whole else [], size
        ends_with_time = whole and is_time[-2:] == [False, True]
        last = (tokens[ends[-1] - 1] - begin) * FRAMES_PER_TIME
        bounds = [0, *ends, len(tokens)] if ends_with_time else [0, *ends]
        parts = [(start, tokens[start:end]) for start, end in pairwise(bounds)]
        advance = size if ends_with_time or last <= 0 else last
        return [_Part(i, own, (own[0] - begin) * step, (own[-1] - begin) * step) for i, own in parts], advance

    @property
    def _size(self) -> int:
        """Frames of the recording in the last window."""
        return min(self._features.num_frames, self._num_frames - self._seek)

    def _without_end(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token != self._tokens.eos]

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without times and other special tokens."""
        return self._decode([token for token in token_ids if token < self._tokens.eos])

    def _forced(self) -> list[tuple[int, ...]]:
        """What each of the tokens after the first one is chosen from."""
        tokens, result = self._tokens, []
        if tokens.languages:
            known = tokens.languages.get(self.language)
            result.append((known,) if known is not None else tuple(tokens.languages.values()))
        if tokens.tasks:
            result.append((tokens.tasks["translate" if self._task.translate else "transcribe"],))
        return result if self._timestamps else [*result, (tokens.no_timestamps,)]

    def _previous(self) -> list[int]:
        """Of the first window, the text before it, as far as half of the context holds it."""
        if self._seek or not self._task.prompt or self._tokens.previous is None:
            return []
        return [self._tokens.previous, *self._task.prompt[-(self._max_len // 2 - 1) :]]


def _all_known(forced: Sequence[Sequence[int]]) -> bool:
    """Whether there is no choice among forced tokens, so that the prompt has them."""
    return all(len(few) == 1 for few in forced)
