"""What a backend of guided decoding gives: forms that are compiled, and the ways through them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from penstock.core import Failure, GuidedDecodingParams

from .added_tokens import AddedTokens


class Guide(Protocol):
    """One sequence's way through what is asked of its output."""

    def copy(self) -> Guide:
        """For a sibling that goes on from here."""
        ...

    def replace_eos(self, end: int) -> int:
        """The token that is taken for one that ends sequences, where this must not end yet."""
        ...

    def take(self, token: int) -> bool:
        """The sequence goes on with a token; False where it cannot, as where a form takes too long to follow."""
        ...

    @property
    def failure(self) -> Failure | None:
        """Why it cannot go on. The tokens it allows are then none that mean anything."""
        ...

    @property
    def free(self) -> bool:
        """Whether any token may come next."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing can be added any more."""
        ...

    @property
    def spent(self) -> bool:
        """Whether as many tokens have come as may; more could be added otherwise."""
        return False

    def allows(self, tokens: list[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """Set the bits of the tokens that may come next, ``[vocabulary / 32]`` int32, and no others.

        Called where not any may come.
        """
        ...

    def forced(self) -> list[int]:
        """The tokens that come next, where no others can."""
        ...


class Grammar(Protocol):
    """A compiled form."""

    size: int
    """Bytes, where that is known and matters."""

    def begin(self) -> Guide:
        """A sequence's way through it, from its first token."""
        ...


class Backend(Protocol):
    """Compiles forms for the tokens of one model."""

    def learn(self, tokens: Any, added: AddedTokens) -> None:
        """Called once, before any form comes.

        Args:
            tokens: llguidance's ``LLTokenizer`` (``read_tokens``).
            added: tokens that no text is tokenized into piece by piece.
        """
        ...

    def compile(self, params: GuidedDecodingParams) -> Grammar:
        """Raises ``PenstockError`` where the form is wrong, or cannot be kept to."""
        ...
