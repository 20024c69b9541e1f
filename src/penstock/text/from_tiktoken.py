"""Conversion of a tiktoken file (lines of base64 token and rank) to the ``tokenizers`` library."""

from __future__ import annotations

import base64
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from .vocabulary import byte_alphabet

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization of GPT-4 and later. The file does not contain it; the length of digit groups is inferred."""


def convert(data: bytes) -> Tokenizer:
    """The tokenizer of a tiktoken file, with GPT-4's pre-tokenization. Digits are grouped by up to three where some
    token is a number of several digits, else not at all."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines() if line)}
    spelled = {byte: character for character, byte in byte_alphabet().items()}

    def decode_token(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            left, right = _last_merge(ranks, token)
            merges.append((decode_token(left), decode_token(right)))
    vocabulary = {decode_token(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    digits = "{1,3}" if any(len(token) > 1 and token.isdigit() for token in ranks) else ""
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(WORDS % digits), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """The last merge that forms a token: merge by lower ranks until two parts are left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [(ranks.get(parts[i] + parts[i + 1], ranks[token]), i) for i in range(len(parts) - 1)]
        rank, at = min(joined)
        if rank >= ranks[token]:
            raise ValueError(f"token {token!r} of rank {ranks[token]} is no merge of two others")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    left, right = parts
    return left, right
