"""What the model's tokens spell, read once and the same for either backend."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from penstock.core import Code, GuidedDecodingParams, PenstockError, Vocabulary

from .guide import NotKeptError, first_line
from .structure import Tag

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


class Own(NamedTuple):
    """Tokens of their own."""

    tokens: Mapping[str, int]
    """By their texts."""
    ends: frozenset[int]
    """Those that end sequences."""

    def split(self, text: str) -> list[str | int]:
        """Parts of a text, of which none is empty, and between them tokens of their own.

        Raises ``NotKeptError`` for a token that ends sequences.
        """
        parts = re.split(f"({'|'.join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))})", text)
        found = [self.tokens.get(part, part) for part in (parts if self.tokens else [text]) if part]
        if end := next((part for part in parts if self.tokens.get(part) in self.ends), None):
            raise NotKeptError(f"{end!r} in a text, which ends every output")
        return found

    def check(self, tags: Iterable[Tag]) -> bool:
        """Whether the triggers of tags are tokens of their own.

        Raises ``NotKeptError`` where only some are, or a trigger would take such a token apart.
        """
        found, of_own = set(), set(self.tokens.values())
        for tag in tags:
            found.add(tag.trigger in self.tokens)
            parts = self.split(tag.trigger) + self.split(tag.begin[len(tag.trigger) :])
            if [part for part in self.split(tag.begin) if part in of_own] != [part for part in parts if part in of_own]:
                raise NotKeptError(f"the trigger {tag.trigger!r}, which is part of a token of {tag.begin!r}")
        if len(found) > 1:
            raise NotKeptError("triggers of which only some are tokens of their own")
        return found == {True}


def own_tokens(known: Vocabulary) -> Own:
    """Tokens of their own (``<think>``), which no other tokens are to write."""
    found = json.loads(known.tokenizer).get("added_tokens") or ()
    return Own({token["content"]: token["id"] for token in found}, frozenset(known.eos))


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
