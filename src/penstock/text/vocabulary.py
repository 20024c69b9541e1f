"""Conversion of a vocabulary to bytes: the bytes that each token adds to the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

MAX_TOKENS = 2**22
"""Maximum vocabulary size; the largest known vocabulary has 262,144 tokens."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # SentencePiece's symbol for a space
Step = Callable[[str], str | bytes]


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token id; empty for ids without a token.

    A text is the concatenation of its tokens' bytes, decoded as UTF-8. Added tokens pass through the decoder like
    other tokens, as in ``Tokenizer.decode`` of the ``tokenizers`` library. Decoder steps that depend on a token's
    position in the text are not applied: a text keeps the leading space that encoding adds (SentencePiece), and the
    space before its first word (WordPiece).

    Raises ``PenstockError``: ``unsupported`` for a decoder whose tokens have no fixed bytes, ``invalid`` for an id of
    ``MAX_TOKENS`` or more.
    """
    steps = _token_steps(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else [_word]
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens |= {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    if (last := max(tokens, default=-1)) >= MAX_TOKENS:
        raise invalid("tokenizer", f"has a token with id {last}; the limit is {MAX_TOKENS}", MAX_TOKENS)
    result = [b""] * (last + 1)
    for token_id, token in tokens.items():
        text: str | bytes = token
        for step in steps:
            if isinstance(text, str):
                text = step(text)
        result[token_id] = text if isinstance(text, bytes) else text.encode()
    return result


def _token_steps(decoder: Mapping[str, Any]) -> list[Step]:
    """The steps that a decoder applies to each token. A step returns text, or final bytes.

    Raises ``PenstockError`` (``unsupported``) for a decoder that is unknown or does not treat tokens separately.
    """
    steps: list[Step] = []
    fused = False
    for part in _flattened(decoder):
        kind = part["type"]
        if kind == "ByteLevel":
            steps.append(_byte_level)
        elif kind == "ByteFallback":
            steps.append(_byte_fallback)
        elif kind == "Metaspace":
            steps.append(partial(_replace, part.get("replacement", SPACE), " "))
        elif kind == "Replace" and (old := part["pattern"].get("String")) and (not fused or len(old) == 1):
            steps.append(partial(_replace, old, part["content"]))
        elif kind == "WordPiece":
            steps.append(partial(_word_piece, part["prefix"]))
        elif kind == "Strip" and not fused:
            steps.append(partial(_strip, part["content"], part["start"], part["stop"]))
        elif kind == "Fuse":
            fused = True
        elif kind != "Strip":  # after Fuse, Strip applies only to the ends of the text
            raise PenstockError(
                Code.UNSUPPORTED,
                f"the tokenizer's decoder {kind} is not supported; supported are ByteLevel, Metaspace, ByteFallback, "
                "Replace of a string, Strip, Fuse and WordPiece",
            )
    return steps


def _flattened(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder in order, with nested sequences flattened."""
    if decoder["type"] != "Sequence":
        yield decoder
    for inner in decoder.get("decoders", ()):
        yield from _flattened(inner)


def _byte_level(token: str) -> str | bytes:
    """The bytes of a token in GPT-2's byte alphabet; a token with other characters is encoded as UTF-8."""
    try:
        return token.translate(BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_fallback(token: str) -> str | bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token


def _replace(old: str, new: str, token: str) -> str:
    return token.replace(old, new)


def _word_piece(prefix: str, token: str) -> str:
    return token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"


def _word(token: str) -> str:
    """Text of a token if the tokenizer has no decoder: tokens are joined with spaces."""
    return f" {token}"


def _strip(content: str, start: int, stop: int, token: str) -> str:
    """Remove up to ``start`` and ``stop`` occurrences of a character from the ends."""
    before = len(token) - len(token.lstrip(content))
    token = token[min(before, start) :]
    after = len(token) - len(token.rstrip(content))
    return token[: len(token) - min(after, stop)]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: character → byte. A printable character stands for itself in Latin-1; characters from
    U+0100 on stand for the other bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(byte) for c, byte in byte_alphabet().items()}
"""Translation table: GPT-2's byte alphabet to Latin-1; other Latin-1 characters to U+FFFF, which cannot be encoded."""
