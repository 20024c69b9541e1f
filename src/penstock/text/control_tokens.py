"""Control tokens in the content of messages, which are encoded as plain text.

``BREAK`` is inserted into each text that equals a control token, before the chat template renders it together with the
template's tokens. The tokenizer (``breaking_tokenizer``) matches no token across ``BREAK``, and removes it when it
splits text into words. All other tokens are matched as always.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import quote

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

BREAK = "\U0001d356\U0001d302"
"""Text that prevents the match of a control token. It consists of two symbols (category So), which normalizers and
templates keep and pre-tokenizers do not separate, in an order that no text has."""
ESCAPED = (json.dumps(BREAK)[1:-1], quote(BREAK))
"""``BREAK`` after the filters ``tojson(ensure_ascii=true)`` and ``urlencode``."""
OPTIONS = ("tools", "documents")
"""Options of a rendering that have content of users or third parties."""
MAX_TRIE_TOKEN = 64
"""Maximum length of a token in the prefix tree of the regular expression, in characters; limits its nesting."""
Messages = Sequence[Mapping[str, Any]]


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
        allowed = {self._folded(token) for token in exempt}
        found = [(match.start(), match[1]) for match in self._every.finditer(folded) if match[1] not in allowed]
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


def with_message_breaks(
    messages: Messages, options: Mapping[str, Any], tokens: ControlTokens, assistant_tokens: Collection[str]
) -> tuple[Messages, Mapping[str, Any]] | None:
    """Return the messages and options of a rendering with breaks in all control tokens; None if there are none.

    Args:
        messages, options: arguments of ``ChatTemplate.render``.
        assistant_tokens: control tokens that stay tokens in the messages of the assistant.
    """
    breaker = _Breaker(tokens)
    converted = [breaker.message(message, assistant_tokens) for message in messages]
    given = {name: options[name] for name in OPTIONS if options.get(name)}
    changes = {name: breaker.convert(value) for name, value in given.items() if tokens.may_occur(value)}
    return (converted, {**options, **changes}) if breaker.changed else None


def restore_breaks(text: str) -> str:
    """Undo escapes of ``BREAK`` by filters of a chat template."""
    for escaped in ESCAPED:
        text = text.replace(escaped, BREAK)
    return text


class _Breaker:
    """Inserts breaks into the texts of one chat."""

    def __init__(self, tokens: ControlTokens) -> None:
        self.changed = False
        """True if a break was inserted."""
        self._tokens = tokens
        self._before = ""
        """Previous text of a message's content."""

    def message(self, message: Mapping[str, Any], assistant_tokens: Collection[str]) -> Mapping[str, Any]:
        exempt = assistant_tokens if message.get("role") == "assistant" else ()
        result: dict[str, Any] = {}
        for name, value in message.items():
            if name == "role":
                result[name] = value
            elif name == "content":
                result[name] = self._content(value, exempt)
            else:
                result[name] = self.convert(value, () if name == "tool_calls" else exempt)
        return result

    def _content(self, content: Any, exempt: Collection[str]) -> Any:
        if isinstance(content, str):
            return self._text(content, exempt)
        if not isinstance(content, (list, tuple)):
            return self.convert(content, exempt)
        return [
            {**part, "text": self._text(part["text"], exempt)}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else self.convert(part, exempt)
            for part in content
        ]

    def _text(self, text: str, exempt: Collection[str]) -> str:
        """Insert breaks into a text, also before it if a control token spans it and the text before it: templates may
        concatenate them, without the spaces around them."""
        result: str = self.convert(text, exempt)
        if self._tokens.join(self._before.rstrip(), text.lstrip()):
            at = len(text) - len(text.lstrip())
            result, self.changed = f"{result[:at]}{BREAK}{result[at:]}", True
        self._before = text
        return result

    def convert(self, value: Any, exempt: Collection[str] = ()) -> Any:
        """Insert breaks into all texts of a JSON value, including the names in objects."""
        if isinstance(value, str):
            offsets = self._tokens.find(value, exempt)
            self.changed |= bool(offsets)
            return insert_breaks(value, offsets) if offsets else value
        if isinstance(value, Mapping):
            return {self.convert(name, exempt): self.convert(each, exempt) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.convert(each, exempt) for each in value]
        return value


def _trie(tokens: Sequence[str]) -> str:
    """Regular expression that matches any of the tokens with one path through their prefix tree. No token may begin
    with another one."""
    groups: dict[str, list[str]] = {}
    for token in tokens:
        groups.setdefault(token[:1], []).append(token[1:])
    paths = [re.escape(first) + (_trie(rest) if rest != [""] else "") for first, rest in groups.items()]
    return paths[0] if len(paths) == 1 else f"(?:{'|'.join(paths)})"
