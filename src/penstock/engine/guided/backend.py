"""Protocols of guided decoding: a ``Guide`` tracks one sequence through a compiled ``Grammar``."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from penstock.core import Failure


class Guide(Protocol):
    """State of one sequence in its grammar."""

    def copy(self) -> Guide:
        """Copy the guide with its state, for a forked sequence."""
        ...

    def replace_eos(self, eos_token_id: int) -> int:
        """Token to accept when the model has sampled EOS: the end-of-reasoning token if EOS was sampled within the
        reasoning and a guided answer has to follow, otherwise ``eos_token_id``."""
        ...

    def accept_token(self, token: int) -> bool:
        """Advance by a token. Returns False if the grammar does not allow the token, or if its processing took too much
        time (then ``failure`` is set)."""
        ...

    @property
    def failure(self) -> Failure | None:
        """Error that prevents the sequence from continuing; None without an error. After an error, bitmasks are
        invalid."""
        ...

    @property
    def is_unconstrained(self) -> bool:
        """True if every token is allowed next, so that no bitmask is needed."""
        ...

    @property
    def is_idle(self) -> bool:
        """True if the guide only waits for a trigger: every token is allowed, whether it is accepted before or after
        the next token is sampled."""
        return False

    def may_trigger(self, tokens: list[int]) -> bool:
        """True if one of ``tokens``, in any order, may end the idle state."""
        return False

    def take_replacement(self) -> list[int]:
        """Tokens that replace the token accepted last, which goes on after a trigger in a way that the grammar does not
        allow; empty if the token remains. The next call returns none."""
        return []

    @property
    def is_terminated(self) -> bool:
        """True if the grammar is complete and allows only EOS."""
        ...

    @property
    def token_limit_reached(self) -> bool:
        """True if the answer has ``response_max_tokens`` tokens."""
        return False

    def validate_tokens(self, tokens: list[int]) -> int:
        """Number of leading ``tokens`` that the grammar allows in this order. The state does not change."""
        ...

    def fill_bitmask(self, row: np.ndarray) -> None:
        """Write the bitmask of allowed next tokens to ``row``, ``[ceil(vocabulary / 32)]`` int32, lowest bit first.

        Must not be called if ``is_unconstrained``.
        """
        ...

    def jump_forward_tokens(self) -> list[int]:
        """Tokens that the grammar forces next (jump-forward decoding); empty if several tokens are allowed."""
        ...


class Grammar(Protocol):
    """A compiled grammar."""

    size: int
    """Bytes of memory that the grammar takes."""
    lowered_tools: tuple[str, ...] = ()
    """``TokenDelta.lowered_tools``."""

    def new_guide(self) -> Guide:
        """Create a guide in the initial state, for a new sequence."""
        ...
