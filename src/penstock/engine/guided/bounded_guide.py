"""Limits on JSON output in addition to the schema: digits of a number, and repetition in a string.

A model that writes ``9999…`` or ``ababab…`` may continue until ``max_tokens``, and leave invalid JSON. A schema cannot
limit such a run without changing the values that it allows. Therefore the guide ends the run: at the limit, it forbids
tokens that continue the run, if the grammar allows any other token. The output follows the schema in either case.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np

from penstock.core import Failure

from .backend import Grammar, Guide

MAX_DIGITS = 40
"""Maximum number of consecutive digits. 128-bit integers have at most 39, 64-bit floats 17 significant digits."""
MAX_REPEATED = 128
"""Maximum number of consecutive tokens of a string that repeat the previous tokens."""
MAX_PERIOD = 8
"""Maximum number of tokens in a recognized repeated sequence."""
LETTERS = frozenset(string.ascii_letters.encode()) - frozenset(b"eE")
"""Letters that do not occur in JSON numbers: the grammar allows them only within a string."""
CLOSERS = frozenset(b'"]} \n')
"""Characters of tokens that end a string."""


class TokenClasses:
    """Classification of a vocabulary's tokens by their bytes. Arrays are ``[vocabulary]``; masks are
    ``[ceil(vocabulary / 32)]`` int32, lowest bit first.

    Args:
        tokens: bytes of each token.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.trailing_digits = np.array([len(token) - len(token.rstrip(b"0123456789")) for token in tokens], np.int32)
        """Number of digits at the end of each token."""
        self.all_digits = np.array([bool(token) and token.isdigit() for token in tokens])
        """True for tokens that consist of digits."""
        self.begins_with_digit = np.array([token[:1].isdigit() for token in tokens])
        """True for tokens that begin with a digit."""
        self.no_digit_mask = ~_bitmask(self.begins_with_digit)
        """Tokens that do not begin with a digit."""
        self.letter_mask = _bitmask(np.array([bool(token) and token[0] in LETTERS for token in tokens]))
        """Tokens that begin with a letter of ``LETTERS``."""
        self.closer_mask = _bitmask(np.array([token[:1] == b'"' and CLOSERS.issuperset(token) for token in tokens]))
        """Tokens that end a string and do not begin another one."""


class BoundedGuide(Guide):
    """Limits runs of digits, and repetition in strings, in the output of another guide.

    Args:
        guide: guide of the grammar.
        classes: token classes of the vocabulary.
        bounds_strings: also limit repetition in strings; requires that all output is JSON.
    """

    def __init__(self, guide: Guide, classes: TokenClasses, bounds_strings: bool) -> None:
        self._guide = guide
        self._classes = classes
        self._bounds_strings = bounds_strings
        self._digits = 0
        """Number of digits at the end of the output."""
        self._recent: list[int] = []
        """The last ``MAX_PERIOD`` tokens, the newest first."""
        self._repeated = [0] * MAX_PERIOD
        """For each period p (index p - 1): number of last output tokens that equal the token p positions earlier."""

    def copy(self) -> BoundedGuide:
        copy = BoundedGuide(self._guide.copy(), self._classes, self._bounds_strings)
        copy._digits, copy._recent, copy._repeated = self._digits, self._recent.copy(), self._repeated.copy()
        return copy

    def replace_eos(self, eos_token_id: int) -> int:
        return self._guide.replace_eos(eos_token_id)

    def accept_token(self, token: int) -> bool:
        self._count(token)
        return self._guide.accept_token(token)

    @property
    def failure(self) -> Failure | None:
        return self._guide.failure

    @property
    def is_unconstrained(self) -> bool:
        return self._guide.is_unconstrained

    @property
    def is_terminated(self) -> bool:
        return self._guide.is_terminated

    def validate_tokens(self, tokens: list[int]) -> int:
        """Number of leading ``tokens`` that the grammar allows, up to the first token at a limit, where the bitmask may
        forbid tokens that the grammar allows."""
        count = self._guide.validate_tokens(tokens)
        state = BoundedGuide(self._guide, self._classes, self._bounds_strings)  # only its counters are used
        state._digits, state._recent, state._repeated = self._digits, self._recent.copy(), self._repeated.copy()
        for i, token in enumerate(tokens[:count]):
            if state._at_bound(token):
                return i
            state._count(token)
        return count

    def fill_bitmask(self, row: np.ndarray) -> None:
        self._guide.fill_bitmask(row)
        if self._digits >= MAX_DIGITS and not (row & self._classes.letter_mask).any():
            _restrict(row, self._classes.no_digit_mask)
        if self._is_repeating and (row & self._classes.letter_mask).any():
            _restrict(row, self._classes.closer_mask)

    def jump_forward_tokens(self) -> list[int]:
        return self._guide.jump_forward_tokens()

    @property
    def _is_repeating(self) -> bool:
        """True if the repetition has reached its limit."""
        return self._bounds_strings and max(self._repeated) >= MAX_REPEATED

    def _at_bound(self, token: int) -> bool:
        """True if a limit may forbid ``token`` next."""
        return self._is_repeating or (self._digits >= MAX_DIGITS and bool(self._classes.begins_with_digit[token]))

    def _count(self, token: int) -> None:
        """Update the counters for an output token."""
        classes = self._classes
        before = self._digits if classes.all_digits[token] else 0
        self._digits = before + int(classes.trailing_digits[token])
        if self._bounds_strings:
            for i, earlier in enumerate(self._recent):
                self._repeated[i] = self._repeated[i] + 1 if earlier == token else 0
            self._recent = [token, *self._recent[: MAX_PERIOD - 1]]


class BoundedGrammar(Grammar):
    """Grammar with the limits of ``BoundedGuide``, and the same arguments."""

    def __init__(self, grammar: Grammar, classes: TokenClasses, bounds_strings: bool) -> None:
        self.size = grammar.size
        self._grammar = grammar
        self._classes = classes
        self._bounds_strings = bounds_strings

    def new_guide(self) -> Guide:
        return BoundedGuide(self._grammar.new_guide(), self._classes, self._bounds_strings)


def _restrict(row: np.ndarray, mask: np.ndarray) -> None:
    """Allow only tokens in ``mask``; leave ``row`` unchanged if that would forbid all tokens."""
    if (row & mask).any():
        row &= mask


def _bitmask(is_set: np.ndarray) -> np.ndarray:
    """Pack bools into int32, lowest bit first."""
    padded = np.zeros(-(-len(is_set) // 32) * 32, bool)
    padded[: len(is_set)] = is_set
    return np.packbits(padded, bitorder="little").view(np.int32)
