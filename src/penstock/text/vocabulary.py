"""The vocabulary as bytes: what each token adds to the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

MAX_TOKENS = 2**22
"""Maximum size of a vocabulary; the largest known have 262,144."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # how SentencePiece writes a space


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token id; empty for ids without a token.

    A text is the concatenation of its tokens' bytes, decoded as UTF-8, for byte-level BPE (GPT-2's printable
    alphabet) and for SentencePiece's BPE and unigram models (a mark for the space, ``<0x0A>`` for single bytes).
    There a text decoded from its start loses the space that encoding put before it; tokens alone keep it. Of WordPiece,
    which no model that generates has, words come with a space before them.

    Raises ``PenstockError``: ``unsupported`` for tokenizers of another make, ``invalid`` for a huge id.
    """
    kinds = set(_types(json.loads(tokenizer.decoder.__getstate__()))) if tokenizer.decoder else set()
    decode_token: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        # What is not of the alphabet is made something that Latin-1 cannot have.
        alphabet = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(byte) for c, byte in byte_alphabet().items()}

        def decode_token(token: str) -> bytes:
            try:
                return token.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()

    elif kinds & {"Metaspace", "ByteFallback"}:

        def decode_token(token: str) -> bytes:
            byte = BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()

    elif type(tokenizer.model).__name__ == "WordPiece":
        prefix = tokenizer.model.continuing_subword_prefix

        def decode_token(token: str) -> bytes:
            return token.removeprefix(prefix).encode() if token.startswith(prefix) else f" {token}".encode()

    else:
        raise PenstockError(
            Code.UNSUPPORTED,
            f"the tokenizer decodes with {', '.join(sorted(kinds)) or 'nothing'}; "
            "known are byte-level BPE, SentencePiece's models and WordPiece",
        )
    added = {token_id: token.content.encode() for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if (last := max(vocabulary.values(), default=-1)) >= MAX_TOKENS:
        raise invalid("tokenizer", f"it has a token of id {last}; {MAX_TOKENS} are allowed", MAX_TOKENS)
    spelled = [b""] * (last + 1)
    for token, token_id in vocabulary.items():
        spelled[token_id] = added.get(token_id) or decode_token(token)
    return spelled


def _types(part: Any) -> Iterator[str]:
    """The types of a decoder and of all decoders nested in it."""
    if isinstance(part, dict):
        yield part["type"]
        for inner in part.get("decoders", ()):
            yield from _types(inner)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable characters stand for themselves, the other bytes for those from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
