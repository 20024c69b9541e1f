"""The model's vocabulary in the form that llguidance needs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.core import Code, GuidedDecodingParams, PenstockError, Vocabulary

from .added_tokens import AddedTokens
from .errors import one_line

GIL_PAUSE = 0.05
"""Seconds to pause between the two halves of loading a tokenizer. Each half holds the GIL; during the pause, a step can
start."""
SLICES = [
    r"[ \n\r\t]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (2, 4, 6, 8, 10, 12, 16, 20, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""llguidance's slices: sets of tokens whose bits are computed together. These are whitespace, and parts of JSON strings
up to ten different lengths. With llguidance's two default lengths, bitmasks of length-limited strings take 1.4 times as
long."""


def sampled_vocabulary(vocabulary: Vocabulary, vocab_size: int) -> Vocabulary:
    """Copy a vocabulary without the added tokens that the model cannot sample (ids from ``vocab_size`` on).

    Args:
        vocab_size: number of tokens of the model.
    """
    content = json.loads(vocabulary.tokenizer)
    added = content.get("added_tokens") or []
    kept = [token for token in added if token["id"] < vocab_size]
    if len(kept) == len(added):
        return vocabulary
    text = json.dumps(content | {"added_tokens": kept}, ensure_ascii=False)
    return Vocabulary(text, [token_id for token_id in vocabulary.eos if token_id < vocab_size])


def load_tokenizer(vocabulary: Vocabulary, vocab_size: int) -> Any:
    """Create llguidance's ``LLTokenizer``.

    Args:
        vocab_size: number of tokens of the model, padding included.

    Raises ``PenstockError`` (``unsupported``) for a tokenizer that llguidance cannot load.
    """
    from llguidance import LLTokenizer

    try:
        tokenizer = LLTokenizer(vocabulary.tokenizer, n_vocab=vocab_size, eos_token=vocabulary.eos, slices=[])
        time.sleep(GIL_PAUSE)
        return tokenizer.with_slices(SLICES)
    except ValueError as error:
        message = f"not supported with this model's tokenizer: {one_line(str(error))}"
        raise PenstockError(Code.UNSUPPORTED, message) from error


def read_added_tokens(vocabulary: Vocabulary) -> AddedTokens:
    """Added tokens (``<think>``, …) of a vocabulary."""
    entries = json.loads(vocabulary.tokenizer).get("added_tokens") or ()
    special = frozenset(entry["content"] for entry in entries if entry.get("special"))
    return AddedTokens({entry["content"]: entry["id"] for entry in entries}, frozenset(vocabulary.eos), special)


def check_no_added_tokens(params: GuidedDecodingParams, added_tokens: Iterable[str]) -> None:
    """Raise ``PenstockError`` (``unsupported``) if a constant, pattern or choice contains the text of an added token.
    The model generates this text as the added token, which llguidance does not match with text."""
    document = params.json or params.structural_tag
    text = "\n".join([params.regex or "", *(params.choice or ()), *_constants(document and json.loads(document))])
    if token := next((token for token in added_tokens if token in text), None):
        message = f"{params.field}: not supported: {token!r}, which is an added token of this model instead of text"
        raise PenstockError(Code.UNSUPPORTED, message, params.field)


def _constants(part: Any, key: str = "") -> Iterator[str]:
    """Constants, patterns and property names in a schema or structural tag."""
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
