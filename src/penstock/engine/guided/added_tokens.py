"""Added tokens in what a grammar spells out: each is one token, and not the characters of its text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .errors import UnsupportedError
from .structure import Tag


class AddedTokens(NamedTuple):
    """Tokens that were added to a vocabulary, special ones among them: no text is split within one."""

    tokens: Mapping[str, int]
    """By their texts."""
    ends: frozenset[int]
    """Those that end sequences."""

    def split(self, text: str) -> list[str | int]:
        """Parts of a text, of which none is empty, and the added tokens between them.

        Raises ``UnsupportedError`` for a token that ends sequences.
        """
        parts = re.split(f"({'|'.join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))})", text)
        found = [self.tokens.get(part, part) for part in (parts if self.tokens else [text]) if part]
        if end := next((part for part in parts if self.tokens.get(part) in self.ends), None):
            raise UnsupportedError(f"{end!r} in a text, which ends every output")
        return found

    def check(self, tags: Iterable[Tag]) -> bool:
        """Whether the triggers of tags are added tokens.

        Raises ``UnsupportedError`` where only some are, or a trigger would take such a token apart.
        """
        found, of_own = set(), set(self.tokens.values())
        for tag in tags:
            found.add(tag.trigger in self.tokens)
            parts = self.split(tag.trigger) + self.split(tag.begin[len(tag.trigger) :])
            if [part for part in self.split(tag.begin) if part in of_own] != [part for part in parts if part in of_own]:
                raise UnsupportedError(f"the trigger {tag.trigger!r}, which is part of a token of {tag.begin!r}")
        if len(found) > 1:
            raise UnsupportedError("triggers of which only some are added tokens")
        return found == {True}
