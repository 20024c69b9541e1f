"""Protocols of guided decoding: a ``Guide`` tracks one sequence through a compiled ``Grammar``."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from penstock.core import Failure


class Guide(Protocol):
    """The state of one sequence in its grammar."""

    def copy(self) -> Guide:
        """A copy in the same state, for a forked sequence."""
        ...

    def replace_eos(self, eos_token_id: int) -> int:
        """The token to accept if the model sampled EOS: ``eos_token_id``, or the end-of-reasoning token if the
        reasoning is still open and a grammar follows it."""
        ...

    def accept_token(self, token: int) -> bool:
        """Advance by a token. Returns False if the grammar does not allow it, or advancing took too long; then
        ``failure`` says why."""
        ...

    @property
    def failure(self) -> Failure | None:
        """Why the sequence cannot continue; None while it can. After a failure, allowed tokens are meaningless."""
        ...

    @property
    def is_unconstrained(self) -> bool:
        """True if every token is allowed next, so that no bitmask is needed."""
        ...

    @property
    def is_terminated(self) -> bool:
        """True if the grammar is complete and allows no further token but EOS."""
        ...

    @property
    def token_limit_reached(self) -> bool:
        """True if ``response_max_tokens`` tokens of the answer have been generated."""
        return False

    def validate_tokens(self, tokens: list[int]) -> int:
        """Number of leading ``tokens`` that may come next, one after the other; does not advance."""
        ...

    def fill_bitmask(self, row: np.ndarray) -> None:
        """Write the bitmask of allowed next tokens to ``row``, ``[ceil(vocabulary / 32)]`` int32, lowest bit first.

        Not called if ``is_unconstrained``.
        """
        ...

    def jump_forward_tokens(self) -> list[int]:
        """The tokens that the grammar forces next (jump forward); empty if it allows a choice."""
        ...


class Grammar(Protocol):
    """A compiled grammar."""

    size: int
    """Bytes of memory."""

    def new_guide(self) -> Guide:
        """A guide for a new sequence, before its first token."""
        ...
