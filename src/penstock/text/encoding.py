"""Encoding with truncation, of single texts and of text pairs (cross-encoders)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec


class Texts(msgspec.Struct, frozen=True):
    """A text or a pair of texts to encode as one prompt."""

    text: str
    pair: str | None = None
    """The second text of a pair."""
    add_special_tokens: bool = True
    max_len: int | None = None
    """Maximum number of tokens, including special tokens; None: no limit. The longer text is truncated first."""
    side: Literal["left", "right"] = "right"
    """Side that is truncated."""
    max_second_len: int | None = None
    """Maximum number of tokens of the second text; None: no limit."""
    has_breaks: bool = False
    """The text has breaks that are removed (``control_tokens.BREAK``)."""

    def __len__(self) -> int:
        return len(self.text) + len(self.pair or "")


class Encoded(NamedTuple):
    """An encoded prompt."""

    token_ids: list[int]
    second_text: int = 0
    """Index of the first token with token type 1; 0 if all tokens have type 0."""
    num_truncated: int = 0
    """Number of tokens that were removed because of a limit."""


def encode_texts(tokenizer: Any, texts: Texts) -> Encoded:
    """Encode with a ``tokenizers.Tokenizer``. Raises ``TypeError`` for texts with unpaired surrogates."""
    special = texts.add_special_tokens
    given = [text for text in (texts.text, texts.pair) if text is not None]
    parts = tokenizer.encode_batch_fast(given, add_special_tokens=False)
    num_tokens = sum(len(part.ids) for part in parts)
    if texts.pair is not None and texts.max_second_len is not None:
        parts[1].truncate(texts.max_second_len, direction=texts.side)
    if texts.max_len is not None:
        added = tokenizer.num_special_tokens_to_add(len(parts) == 2) if special else 0
        lengths = truncated_lengths([len(part.ids) for part in parts], max(texts.max_len - added, 0))
        for part, length in zip(parts, lengths, strict=True):
            part.truncate(length, direction=texts.side)
    num_truncated = num_tokens - sum(len(part.ids) for part in parts)
    encoded = tokenizer.post_process(*parts, add_special_tokens=special)
    return Encoded(encoded.ids, encoded.type_ids.index(1) if 1 in encoded.type_ids else 0, num_truncated)


def truncated_lengths(lengths: list[int], limit: int) -> list[int]:
    """Number of tokens kept of each text: the longer one is truncated first (Hugging Face's ``longest_first``)."""
    if len(lengths) == 1:
        return [min(lengths[0], limit)]
    short, long = sorted(lengths)
    if short + long > limit:
        long = max(short, limit - short) if short <= limit else short
        if short + long > limit:
            short, long = limit // 2, limit - limit // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]
