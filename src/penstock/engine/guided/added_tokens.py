"""Added tokens of a tokenizer, special tokens included. Their text is always a single token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .errors import UnsupportedError
from .structural_tag import TagFormat


class AddedTokens(NamedTuple):
    """The added tokens of a tokenizer."""

    tokens: Mapping[str, int]
    """Token ids by text."""
    eos_token_ids: frozenset[int]

    def split(self, text: str) -> list[str | int]:
        """Split a text into the ids of its added tokens and the non-empty texts between them.

        Raises ``UnsupportedError`` for an EOS token in the text.
        """
        pattern = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        parts = [part for part in (re.split(f"({pattern})", text) if self.tokens else [text]) if part]
        if eos := next((part for part in parts if self.tokens.get(part) in self.eos_token_ids), None):
            raise UnsupportedError(f"the EOS token {eos!r} in a text, since it ends the output")
        return [self.tokens.get(part, part) for part in parts]

    def are_triggers(self, tags: Iterable[TagFormat]) -> bool:
        """True if the triggers of all tags are added tokens, False if none is.

        Raises ``UnsupportedError`` if only some are, or if a trigger splits an added token of the tag's ``begin``.
        """
        are_added, token_ids = set(), set(self.tokens.values())
        for tag in tags:
            are_added.add(tag.trigger in self.tokens)
            separately = self.split(tag.trigger) + self.split(tag.begin[len(tag.trigger) :])
            together = self.split(tag.begin)
            if [part for part in together if part in token_ids] != [part for part in separately if part in token_ids]:
                raise UnsupportedError(f"the trigger {tag.trigger!r}, which is part of a token of {tag.begin!r}")
        if len(are_added) > 1:
            raise UnsupportedError("triggers of which only some are added tokens")
        return are_added == {True}
