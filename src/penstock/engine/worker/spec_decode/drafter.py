"""Drafters that run in the worker: a draft model, or heads on the model's hidden states."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from penstock.core import Code

from ...step import RowUpdates, SampledTokens


class VerifiedStep(NamedTuple):
    """A computed step, whose draft tokens are verified and whose sampled tokens are written to the batch. Items are
    those of ``StepInput``; arrays are int32."""

    rows: np.ndarray
    """``[items]``"""
    starts: np.ndarray
    """``[items]``: position of the first token computed."""
    lengths: np.ndarray
    """``[items]``: tokens computed, draft tokens not counted."""
    drafts: np.ndarray
    """``[items]``: number of draft tokens, 0 where there were none."""
    sampled: dict[int, SampledTokens]
    """What each row sampled, by row; rows that did not sample are missing."""
    forks: dict[int, list[int]]
    """Rows that were forked in this step, by parent row."""
    hidden: Tensor
    """``[tokens, hidden]`` in the model's dtype: the last hidden states of all tokens of all items, draft tokens
    included, where the drafter ``needs_all_hidden_states``; else only those that sampling needed. Of a model with
    ``aux_hidden_state_layers`` the hidden states of these, one beside the other, of all tokens."""
    accepted: dict[int, list[int]]
    """By row, where its draft was a tree: indices of the accepted ones among its draft tokens."""


class DraftBuilder:
    """Builds the drafts of some rows, one token at a time.

    Args:
        count: number of rows.
    """

    def __init__(self, count: int) -> None:
        self.token_ids: list[list[int] | None] = [[] for _ in range(count)]
        """The drafts, as ``Propose`` is answered: None for a row whose draft has failed."""

    def add(self, index: int, sampled: SampledTokens) -> int | None:
        """Append a sampled token to the draft of row ``index``, and return it. Returns None where sampling failed: the
        draft ends there. Where the drafter's logits are not finite, the row's draft becomes None."""
        if not sampled.failure:
            (token,) = sampled.token_ids
            draft = self.token_ids[index]
            assert draft is not None
            draft.append(token)
            return token
        if sampled.failure.code is Code.INTERNAL:
            self.token_ids[index] = None
        return None


class WorkerDrafter(Protocol):
    """A drafter that runs a model in the worker, for rows of its batch.

    The worker calls ``apply`` before each step, ``propose`` for each ``Propose`` message, and ``after_step`` after each
    step.
    """

    needs_all_hidden_states: bool
    """Whether ``after_step`` reads the hidden states of all tokens of a step."""

    def init_cache(self, blocks: int) -> None:
        """Allocate the drafter's KV cache, of as many blocks as the model's; a sequence has the same block numbers in
        both."""
        ...

    def apply(self, updates: RowUpdates) -> None:
        """Apply changes of rows, which are applied to the batch already."""
        ...

    def propose(
        self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray, trees: np.ndarray
    ) -> list[list[int] | None]:
        """Draft tokens: arguments and result are those of the message ``step.Propose``."""
        ...

    def after_step(self, step: VerifiedStep) -> None:
        """Update the drafter's state after a step."""
        ...

    def reset(self) -> None:
        """Forget what was computed; called after an error, since ranks may have computed different parts."""
        ...
