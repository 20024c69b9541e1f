"""A tokenizer that does not match the control tokens of a text with breaks, and the search for control tokens in a
vocabulary."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.pre_tokenizers import Split

from .control_tokens import BREAK, ControlTokens, insert_breaks
from .vocabulary import byte_alphabet

logger = logging.getLogger(__name__)

MARKER = re.compile(r"\s*(<.+>|\[.+\]|.*[|｜].*)\s*", re.DOTALL)
"""Form of control tokens among the added tokens that are not special: ``<think>``, ``[INST]``, ``<|im_start|>``."""
PIECE_MARKER = re.compile(r"</?[a-z]+([_:][a-z]+)*>|<\|.+\|>|<｜.+｜>|\[/?[A-Z_]+\]")
"""Form of control tokens among the user-defined pieces of a SentencePiece model, which are no added tokens."""
HTML = re.compile(
    "</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|table|tbody|td|tfoot|th"
    "|thead|tr|u|ul)/?>"
)
"""HTML tags, which are tokens of ordinary text in some vocabularies (Gemma)."""
FOLDING = frozenset(("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "StripAccents"))
"""Normalizers that can turn another text into a control token (``＜s＞`` into ``<s>``)."""


def with_breaks(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that removes each ``BREAK`` from a text and matches no token across it.

    It shares the vocabulary with ``tokenizer``, so that it needs neither time nor memory.
    """
    result = _without_added_tokens(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    result.add_tokens([added[token_id] for token_id in sorted(added)])
    if tokenizer.post_processor is not None:
        result.post_processor = tokenizer.post_processor
    return result


def find_control_tokens(tokenizer: Tokenizer, breaking: Tokenizer) -> ControlTokens:
    """Find the control tokens of a tokenizer.

    Args:
        breaking: result of ``with_breaks``.
    """
    added = tokenizer.get_added_tokens_decoder()
    plain = _without_added_tokens(tokenizer)
    texts = {token.content: token_id for token_id, token in added.items() if _is_control(token)}
    has_pieces = not _is_byte_level(tokenizer)
    if has_pieces:
        pieces = {
            piece: token_id
            for piece, token_id in tokenizer.get_vocab(with_added_tokens=False).items()
            if PIECE_MARKER.fullmatch(piece) and not HTML.fullmatch(piece)
        }
        whole = plain.encode_batch([*pieces], add_special_tokens=False)
        texts |= {
            piece: token_id
            for (piece, token_id), encoded in zip(pieces.items(), whole, strict=True)
            if token_id in encoded.ids
        }
    texts = {text: token_id for text, token_id in texts.items() if len(text) > 1}
    breaks, lost = _choose_breaks(texts, plain, breaking)
    if lost:
        message = "control tokens such as %r cannot be protected with this tokenizer: they stay tokens in messages"
        logger.warning(message, lost[0])
    folds = has_pieces or any(token.normalized for token in added.values() if token.content in texts)
    return ControlTokens(breaks, list(_folding_steps(_state(tokenizer.normalizer))) if folds else [])


def _is_control(token: AddedToken) -> bool:
    if token.special:
        return True
    return bool(MARKER.fullmatch(token.content)) and not HTML.fullmatch(token.content)


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Copy of a tokenizer that removes ``BREAK`` and has no added tokens and post-processor."""
    result = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        result.normalizer = tokenizer.normalizer
    # A byte-level pre-tokenizer converts BREAK too, so that the last step sees its bytes.
    characters = {byte: character for character, byte in byte_alphabet().items()}
    found = "".join(characters[byte] for byte in BREAK.encode()) if _is_byte_level(tokenizer) else BREAK
    last = Split(found, "removed")
    result.pre_tokenizer = Steps([tokenizer.pre_tokenizer, last] if tokenizer.pre_tokenizer is not None else [last])
    return result


def _choose_breaks(texts: Mapping[str, int], plain: Tokenizer, breaking: Tokenizer) -> tuple[dict[str, int], list[str]]:
    """Choose a break for each control token: after its first word or, if that changes how the text is encoded, after
    its first token.

    Args:
        texts: token → id.

    Returns the breaks (see ``ControlTokens.breaks``), and the tokens that cannot be protected.
    """

    def encode(tokenizer: Tokenizer, parts: Iterable[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch([f" {part}" for part in parts], add_special_tokens=False)
        return [each.ids for each in encoded]

    (probe,) = breaking.encode_batch([f"a{BREAK}a"], add_special_tokens=False)
    if any(start < 1 + len(BREAK) and end > 1 for start, end in probe.offsets):  # BREAK is not removed
        return {}, [*texts]
    expected = encode(plain, texts)
    candidates = [_boundaries(text, each) for text, each in zip(texts, plain.encode_batch([*texts]), strict=True)]
    by_word, by_token = (
        encode(breaking, [insert_breaks(text, [at[i]]) for text, at in zip(texts, candidates, strict=True)])
        for i in range(2)
    )
    breaks: dict[str, int] = {}
    lost: list[str] = []
    for i, (text, token_id) in enumerate(texts.items()):
        use_token = by_word[i] != expected[i] and by_token[i] == expected[i]
        breaks[text] = candidates[i][use_token]
        if token_id in (by_token if use_token else by_word)[i]:
            lost.append(text)
    return {text: at for text, at in breaks.items() if text not in lost}, lost


def _boundaries(text: str, encoded: Any) -> tuple[int, int]:
    """Lengths of the first word and of the first token of a text, which is encoded without control tokens; 1 if the
    text has only one."""
    ends = [0, *(end for _, end in encoded.offsets)]
    words = [end for end, word in zip(ends, encoded.word_ids, strict=False) if word]
    token = next((end for end in ends if 0 < end < len(text)), 1)
    return next((end for end in words if 0 < end < len(text)), token), token


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    steps = (*_flattened(_state(tokenizer.normalizer)), *_flattened(_state(tokenizer.pre_tokenizer)))
    return any(step["type"] == "ByteLevel" for step in steps)


def _folding_steps(normalizer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for step in _flattened(normalizer):
        if step["type"] in FOLDING:
            yield dict(step)


def _state(component: Any) -> Mapping[str, Any]:
    """JSON of a normalizer or pre-tokenizer; empty if absent."""
    state: Mapping[str, Any] = json.loads(component.__getstate__()) if component is not None else {}
    return state


def _flattened(component: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of a component in order, with nested sequences flattened."""
    inner = component.get("normalizers", component.get("pretokenizers"))
    if inner is None:
        yield from [component] if component else []
    for step in inner or ():
        yield from _flattened(step)
