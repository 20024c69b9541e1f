"""Conversion of a tiktoken file (each line a base64 token and its rank) to the ``tokenizers`` library."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from .tiktoken_formats import TiktokenFormat
from .vocabulary import byte_alphabet


def convert(data: bytes, form: TiktokenFormat) -> Tokenizer:
    """Build the tokenizer of a tiktoken file.

    Args:
        form: pre-tokenizer pattern and normalization, which the file does not contain.
    """
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines() if line)}
    return from_ranks(ranks, form)


def from_ranks(ranks: dict[bytes, int], form: TiktokenFormat, before: Sequence[str] = ()) -> Tokenizer:
    """Build a tokenizer from tokens with their merge ranks.

    Args:
        before: tokens with the first ids. The id of a token in ``ranks`` is its rank plus their number.
    """
    characters = {byte: character for character, byte in byte_alphabet().items()}

    def decode_token(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        merges += [(decode_token(left), decode_token(right)) for left, right in _last_merges(ranks, token)]
    vocabulary = {token: i for i, token in enumerate(before)}
    vocabulary |= {decode_token(token): len(before) + rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    if form.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(form.pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _last_merges(ranks: dict[bytes, int], token: bytes) -> list[tuple[bytes, bytes]]:
    """The merges that form a token: the pair that remains after all merges of lower rank, or, if more than two parts
    remain, every split of the token into two tokens."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [(ranks.get(parts[i] + parts[i + 1], ranks[token]), i) for i in range(len(parts) - 1)]
        rank, at = min(joined)
        if rank >= ranks[token]:
            halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            return [(left, right) for left, right in halves if left in ranks and right in ranks]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [(parts[0], parts[1])] if len(parts) == 2 else []
