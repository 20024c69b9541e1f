"""Added tokens of a tokenizer, special tokens included. The text of an added token is always a single token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .errors import UnsupportedError
from .structural_tag import TagFormat


class AddedTokens(NamedTuple):
    """The added tokens of a tokenizer."""

    tokens: Mapping[str, int]
    """Token ids by text."""
    eos_token_ids: frozenset[int]
    """End-of-sequence tokens, which a text must not contain."""
    special: frozenset[str] = frozenset()
    """Texts of the special tokens, which are removed from the output's text unless they are markers."""

    def split(self, text: str) -> list[str | int]:
        """Split a text into the ids of its added tokens and the non-empty texts between them.

        Raises ``UnsupportedError`` for an EOS token in the text.
        """
        pattern = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        parts = [part for part in (re.split(f"({pattern})", text) if self.tokens else [text]) if part]
        if eos := next((part for part in parts if self.tokens.get(part) in self.eos_token_ids), None):
            raise UnsupportedError(f"the EOS token {eos!r} in a text, since EOS ends the output")
        return [self.tokens.get(part, part) for part in parts]

    def are_triggers(self, tags: Sequence[TagFormat]) -> bool:
        """True if the triggers of all tags are added tokens, False if no trigger is.

        Raises ``UnsupportedError`` if only some triggers are added tokens, or if a trigger splits an added token of the
        tag's ``begin``.
        """
        are_added, token_ids = set(), set(self.tokens.values())
        for tag in tags:
            are_added.add(tag.trigger in self.tokens)
            separately = self.split(tag.trigger) + self.split(tag.begin[len(tag.trigger) :])
            together = self.split(tag.begin)
            if [part for part in together if part in token_ids] != [part for part in separately if part in token_ids]:
                raise UnsupportedError(f"the trigger {tag.trigger!r}, which is part of a token of {tag.begin!r}")
        if len(are_added) > 1:
            added = [tag.trigger for tag in tags if tag.trigger in self.tokens]
            raise UnsupportedError(f"triggers that are added tokens ({', '.join(added)}) together with other triggers")
        return are_added == {True}
