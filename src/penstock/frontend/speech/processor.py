"""Speech processor of a model: audio decoding, features and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.options import ModelOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.text import Tokenizer

from .audio_decoding import decode_audio
from .features import LogMelFeatures, read_log_mel_features
from .languages import language_code
from .tokens import SpeechTokens, read_speech_tokens
from .transcription import SpeechTask, Transcription


class SpeechProcessor:
    """Creates transcriptions of audio files."""

    def __init__(
        self, features: LogMelFeatures, tokens: SpeechTokens, tokenizer: Tokenizer, options: ModelOptions
    ) -> None:
        self._features, self._tokens, self._tokenizer, self._options = features, tokens, tokenizer, options

    @property
    def max_file_size(self) -> int:
        """Limit of the file size in bytes."""
        return self._options.max_audio_size

    def task(
        self, translate: bool, language: str | None, prompt: str | None, timestamps: bool, words: bool = False
    ) -> SpeechTask:
        """Create the task of a request. Raises ``PenstockError`` if the model does not support the task."""
        tokens, code = self._tokens, language_code(language or "")
        if not tokens.languages and translate:
            raise PenstockError(Code.UNSUPPORTED, "this English-only model does not support translation")
        if tokens.tasks and ("translate" if translate else "transcribe") not in tokens.tasks:
            raise PenstockError(Code.UNSUPPORTED, "this model does not support translation, only transcription")
        if code and code not in (tokens.languages or ("en",)):
            known = ", ".join(sorted(tokens.languages)) or "en"
            raise invalid("language", f"{language!r:.40} is not supported by this model; supported are {known}")
        text = f" {prompt.strip()}" if prompt and prompt.strip() else ""
        ids = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        if any(token >= tokens.eos for token in ids):
            raise invalid("prompt", "contains a special token (<|…|>): remove it")
        if words and not tokens.alignment_heads:
            message = "word timestamps need alignment_heads in generation_config.json, which this model lacks"
            raise PenstockError(Code.UNSUPPORTED, f"timestamp_granularities: {message}", "timestamp_granularities")
        return SpeechTask(translate, code if tokens.languages else "", ids, timestamps or words, words)

    def open(self, file: bytes, task: SpeechTask, max_len: int) -> Transcription:
        """Decode a file and create its transcription. Slow: call it in a thread.

        Args:
            max_len: size of the model's context in tokens.

        Raises ``PenstockError`` if the file cannot be decoded.
        """
        options, rate = self._options, self._features.sampling_rate
        samples = decode_audio(file, rate, options.max_audio_duration, options.audio_timeout)

        def decode(token_ids: list[int]) -> str:
            return self._tokenizer.decode(token_ids, skip_special_tokens=True)

        return Transcription(samples, task, self._features, self._tokens, max_len, decode)


def read_speech_processor(
    folder: Path, tokenizer: Tokenizer, eos: int, config: Mapping[str, Any], options: ModelOptions
) -> SpeechProcessor:
    """Read the speech processor of a speech-to-text checkpoint (``checkpoint.speech.is_speech``).

    Args:
        eos: id of the EOS token.
        config: content of ``config.json``.

    Raises ``PenstockError`` (``invalid``) if a file is malformed.
    """
    features = read_log_mel_features(folder)
    tokens = read_speech_tokens(folder, tokenizer.token_to_id, eos, int(config["vocab_size"]))
    shape = features.feature_size, features.num_frames
    expected = int(config["num_mel_bins"]), 2 * int(config["max_source_positions"])
    if shape != expected:
        problem = f"preprocessor_config.json has windows of {shape[1]} frames with {shape[0]} mel bins"
        raise invalid("model", f"{problem}; by config.json they must have {expected[1]} frames with {expected[0]}")
    return SpeechProcessor(features, tokens, tokenizer, options)
