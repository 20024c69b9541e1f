"""Control tokens of Whisper models, from ``generation_config.json`` and the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import invalid

from .languages import NAMES

LANGUAGE = re.compile(r"<\|(\w+)\|>")
MULTILINGUAL_SIZE = 51_865
"""Smallest vocabulary size of multilingual Whisper models; English-only models have 51,864 tokens."""


@dataclass(frozen=True)
class SpeechTokens:
    """Ids of a Whisper model's control tokens."""

    start: int
    """Id of ``<|startoftranscript|>``."""
    eos: int
    """Id of ``<|endoftext|>``. Text tokens have smaller ids, other special tokens have larger ids."""
    no_timestamps: int
    """Id of ``<|notimestamps|>``. The next id is the timestamp of 0 seconds."""
    previous: int | None
    """Id of ``<|startofprev|>``, the token before text that precedes the transcript; None: not in the vocabulary."""
    languages: Mapping[str, int]
    """Ids of language tokens by code; empty for an English-only model."""
    tasks: Mapping[str, int]
    """Ids of the tokens of the tasks ``transcribe`` and ``translate``; empty for an English-only model."""
    suppressed: tuple[int, ...] = ()
    """Ids of tokens that are never generated."""
    suppressed_first: tuple[int, ...] = ()
    """Ids of tokens that are not generated as the first token."""
    max_initial_timestamp: int = 50
    """Largest first timestamp, as a number of timestamp tokens after the token of 0 seconds."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layer and head of the attention heads used for word timestamps; empty if unknown."""

    @property
    def timestamp_begin(self) -> int:
        """Id of the timestamp token of 0 seconds."""
        return self.no_timestamps + 1


def read_speech_tokens(
    folder: Path, token_to_id: Callable[[str], int | None], eos: int, vocab_size: int
) -> SpeechTokens:
    """Read the control tokens of a checkpoint. A ``generation_config.json`` from before transformers 4.31 lacks
    languages and tasks; they are then taken from the tokenizer.

    Args:
        token_to_id: returns the id of a token of the tokenizer.
        eos: id of the EOS token.
        vocab_size: size of the model's vocabulary; shows whether the model is English-only.

    Raises ``PenstockError`` (``invalid``) if a file is malformed, or tokens are missing.
    """
    path = folder / "generation_config.json"
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}
        multilingual = given.get("is_multilingual")
        if multilingual is None:
            multilingual = bool(given.get("lang_to_id")) or vocab_size >= MULTILINGUAL_SIZE
        languages = given.get("lang_to_id") or _known((f"<|{code}|>" for code in NAMES), token_to_id)
        tasks = given.get("task_to_id") or {
            token.strip("<|>"): id for token, id in _known(("<|transcribe|>", "<|translate|>"), token_to_id).items()
        }
        if not multilingual:
            languages, tasks = {}, {}
        first = given.get("max_initial_timestamp_index")
        return SpeechTokens(
            start=_token(given.get("decoder_start_token_id"), token_to_id("<|startoftranscript|>")),
            eos=eos,
            no_timestamps=_token(given.get("no_timestamps_token_id"), token_to_id("<|notimestamps|>")),
            previous=given.get("prev_sot_token_id") or token_to_id("<|startofprev|>"),
            languages={match[1]: int(id) for name, id in languages.items() if (match := LANGUAGE.fullmatch(name))},
            tasks={str(name): int(id) for name, id in tasks.items()},
            suppressed=tuple(int(id) for id in given.get("suppress_tokens") or () if int(id) >= 0),
            suppressed_first=tuple(int(id) for id in given.get("begin_suppress_tokens") or () if int(id) >= 0),
            max_initial_timestamp=50 if first is None else int(first),
            alignment_heads=tuple((int(layer), int(head)) for layer, head in given.get("alignment_heads") or ()),
        )
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, AttributeError, TypeError, ValueError) as error:
        raise invalid("model", f"{path} has no valid Whisper configuration: {error}") from error


def _known(tokens: Iterable[str], token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """Ids of the tokens that exist in the tokenizer."""
    ids = ((token, token_to_id(token)) for token in tokens)
    return {token: token_id for token, token_id in ids if token_id is not None}


def _token(configured: Any, default: int | None) -> int:
    token = default if configured is None else configured
    if token is None:
        raise ValueError("decoder_start_token_id or no_timestamps_token_id is missing")
    return int(token)
