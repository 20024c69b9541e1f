"""What the model's tokens spell, read once and the same for either backend."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.core import Code, GuidedDecodingParams, PenstockError, Vocabulary

from .added_tokens import AddedTokens
from .errors import first_line

PAUSE = 0.05
"""Seconds in which a step can be made between the two halves of reading a vocabulary."""
SLICES = [
    r"[ \n\r\t]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (2, 4, 6, 8, 10, 12, 16, 20, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Kinds of tokens that are allowed or not together where masks are found: those that strings of JSON hold, up to a
length. With the two lengths that llguidance has by itself, masks of strings whose length is bounded take 1.4 times as
long."""


def read_tokens(known: Vocabulary, size: int) -> Any:
    """llguidance's ``LLTokenizer``, which knows each token's bytes, and which tokens are marks that no text spells.

    Args:
        size: of the model's vocabulary.

    Raises ``PenstockError`` (``unsupported``) where it cannot.
    """
    from llguidance import LLTokenizer

    try:
        plain = LLTokenizer(known.tokenizer, n_vocab=size, eos_token=known.eos, slices=[])
        time.sleep(PAUSE)  # in two halves, since each holds Python's global lock
        return plain.with_slices(SLICES)
    except ValueError as error:
        words = f"not with this model's tokenizer: {first_line(str(error))}"
        raise PenstockError(Code.UNSUPPORTED, words) from error


def added_tokens(known: Vocabulary) -> AddedTokens:
    """Tokens of their own (``<think>``), which no other tokens are to write."""
    found = json.loads(known.tokenizer).get("added_tokens") or ()
    return AddedTokens({token["content"]: token["id"] for token in found}, frozenset(known.eos))


def check_text(params: GuidedDecodingParams, own: Iterable[str]) -> None:
    """Raises ``PenstockError`` (``unsupported``) for a form that asks for one of these texts, or may ask for it."""
    shape = params.json or params.structural_tag
    text = "\n".join([params.regex or "", *(params.choice or ()), *_constants(shape and json.loads(shape))])
    if token := next((token for token in own if token in text), None):
        words = f"{params.field}: cannot be kept to: {token!r} is a token of its own, and no text, for this model"
        raise PenstockError(Code.UNSUPPORTED, words, params.field)


def _constants(part: Any, key: str = "") -> Iterator[str]:
    """Texts of schemas and patterns that may have to be written."""
    if isinstance(part, str) and key in ("const", "enum", "pattern"):
        yield part
    elif isinstance(part, list):
        for inner in part:
            yield from _constants(inner, key)
    elif isinstance(part, dict):
        for name, inner in part.items():
            if key == "properties":
                yield name
            yield from _constants(inner, key if key in ("const", "enum") else name)
