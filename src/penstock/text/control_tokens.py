"""Control tokens of a tokenizer, and a tokenizer that does not match those in the content of messages.

``BREAK`` is inserted into each text that equals a control token, so that the text no longer matches. The tokenizer
removes ``BREAK`` when it splits text into words. All other tokens are matched as always.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.pre_tokenizers import Split

from .vocabulary import byte_alphabet

logger = logging.getLogger(__name__)

BREAK = "\U0001d356\U0001d302"
"""Text that prevents the match of a control token. It consists of two symbols (category So), which normalizers and
templates keep and pre-tokenizers do not separate, in an order that no text has."""
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
MAX_TRIE_TOKEN = 64
"""Maximum length of a token in the prefix tree of the regular expression, in characters; limits its nesting."""


class ControlTokens(msgspec.Struct, frozen=True, dict=True):
    """Control tokens: special tokens, and added tokens that look like markers."""

    breaks: dict[str, int] = {}
    """Text of a token → number of characters before its ``BREAK``: the length of the first word, or token, of the
    plain text, so that the break rarely changes how the text is encoded."""
    normalizers: list[dict[str, Any]] = []
    """Steps of the normalizer that can turn another text into a control token, as in ``tokenizer.json``."""

    def find(self, text: str, exempt: Collection[str] = ()) -> list[int]:
        """Return ascending offsets at which breaks prevent all matches of control tokens.

        Args:
            exempt: control tokens that stay tokens.
        """
        folded = self._folded(text)
        if not self.breaks or not self._pattern.search(folded):
            return []
        found = [(match.start(), match[1]) for match in self._every.finditer(folded) if match[1] not in exempt]
        if folded == text:
            return sorted({start + self._breaks[token] for start, token in found})
        starts = list(accumulate((len(self._folded(character)) for character in text), initial=0))
        inner = ((bisect_right(starts, start), start + len(token)) for start, token in found)
        return sorted({at for at, end in inner if starts[at] < end})

    def may_occur(self, value: Any) -> bool:
        """False if a JSON value has no text with a control token; faster than ``find`` for many short texts."""
        if self._are_escaped:
            return True
        try:
            return bool(self.find(msgspec.json.encode(value).decode()))
        except (TypeError, ValueError, RecursionError):  # the chat template reports wrong values
            return True

    def join(self, before: str, after: str) -> bool:
        """True if a control token begins in ``before`` and ends in ``after`` when they are concatenated."""
        if not self.breaks:
            return False
        before, after = self._folded(before[-self._longest :]), self._folded(after[: self._longest])
        found = self._every.finditer(before + after)
        return any(match.start() < len(before) < match.start() + len(match[1]) for match in found)

    def _folded(self, text: str) -> str:
        return text.translate(self._fold) if self._fold is not None else text

    @cached_property
    def _fold(self) -> _Fold | None:
        return _Fold(self.normalizers) if self.normalizers else None

    @cached_property
    def _breaks(self) -> dict[str, int]:
        """``breaks`` by folded text, without tokens that begin with another token: a break in the other one also
        breaks them."""
        folded = {self._folded(token): at for token, at in self.breaks.items()}
        kept: dict[str, int] = {}
        last = None
        for token in sorted(folded):
            if len(token) > 1 and (last is None or not token.startswith(last)):
                kept[token], last = min(folded[token], len(token) - 1), token
        return kept

    @cached_property
    def _are_escaped(self) -> bool:
        """True if JSON escapes a character of a control token."""
        return any(json.dumps(token, ensure_ascii=False) != f'"{token}"' for token in self.breaks)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._breaks), default=0)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Regular expression of one control token."""
        short = [token for token in self._breaks if len(token) <= MAX_TRIE_TOKEN]
        long = [re.escape(token) for token in self._breaks if len(token) > MAX_TRIE_TOKEN]
        return re.compile("|".join([*([_trie(short)] if short else []), *long]) or r"(?!)")

    @cached_property
    def _every(self) -> re.Pattern[str]:
        """Regular expression of the place before a control token, which finds overlapping tokens."""
        return re.compile(f"(?=({self._pattern.pattern}))")


class _Fold(dict[int, str]):
    """Translation table: character → normalized text."""

    def __init__(self, steps: Sequence[Mapping[str, Any]]) -> None:
        empty = json.loads(Tokenizer(BPE()).to_str())
        normalizer = {"type": "Sequence", "normalizers": steps}
        self._normalizer = Tokenizer.from_str(json.dumps(empty | {"normalizer": normalizer})).normalizer

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if not 0xD800 <= code < 0xE000:  # surrogates are no valid text
            character = self._normalizer.normalize_str(character)
        self[code] = character
        return character


def insert_breaks(text: str, offsets: Sequence[int]) -> str:
    """Insert ``BREAK`` at ascending offsets."""
    bounds = [0, *offsets, len(text)]
    return BREAK.join([text[start:end] for start, end in pairwise(bounds)])


def remove_breaks(text: str) -> str:
    """Remove each ``BREAK`` from a text."""
    return text.replace(BREAK, "")


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


def _trie(tokens: Sequence[str]) -> str:
    """Regular expression that matches any of the tokens with one path through their prefix tree. No token may begin
    with another one."""
    groups: dict[str, list[str]] = {}
    for token in tokens:
        groups.setdefault(token[:1], []).append(token[1:])
    paths = [re.escape(first) + (_trie(rest) if rest != [""] else "") for first, rest in groups.items()]
    return paths[0] if len(paths) == 1 else f"(?:{'|'.join(paths)})"
