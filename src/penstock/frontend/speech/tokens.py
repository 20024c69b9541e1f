"""The tokens by which a Whisper model is told what to do, from ``generation_config.json`` and the tokenizer."""

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
"""Vocabulary size from which on models of Whisper know languages other than English; those for English have 51,864."""


@dataclass(frozen=True)
class SpeechTokens:
    """Token ids."""

    start: int
    """Begins a transcript."""
    eos: int
    """Ends it; all tokens of text come before this one."""
    no_timestamps: int
    """Begins a transcript without times; that of the time 0 follows it."""
    previous: int | None
    """Begins the text before the transcript."""
    languages: Mapping[str, int]
    """By code; empty of a model for English."""
    tasks: Mapping[str, int]
    """``transcribe`` and ``translate``; empty of a model for English."""
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    max_initial_timestamp: int = 50
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layer and head of each attention head that times of words are read from; empty where they are not known."""

    @property
    def timestamp_begin(self) -> int:
        """Of the time 0."""
        return self.no_timestamps + 1


def read_speech_tokens(
    folder: Path, token_to_id: Callable[[str], int | None], eos: int, vocab_size: int
) -> SpeechTokens:
    """Read a checkpoint's. Where ``generation_config.json`` lacks the languages and tasks (of before transformers
    4.31), they are those that the tokenizer has tokens of.

    Args:
        token_to_id: of its tokenizer.
        eos: the token that ends its texts.
        vocab_size: size of the model's vocabulary, which tells whether it is for English only.

    Raises ``PenstockError`` (``invalid``) where a file is damaged, or lacks what is needed.
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
        raise invalid("model", f"{path} does not say how speech is transcribed: {error}") from error


def _known(tokens: Iterable[str], token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """The ids of those tokens that the tokenizer has."""
    ids = ((token, token_to_id(token)) for token in tokens)
    return {token: token_id for token, token_id in ids if token_id is not None}


def _token(given: Any, named: int | None) -> int:
    token = named if given is None else given
    if token is None:
        raise ValueError("decoder_start_token_id or no_timestamps_token_id is missing")
    return int(token)
