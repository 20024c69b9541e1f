"""Interface of drafters that run in the worker: a draft model, or draft heads."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from penstock.core import Code

from ...step import RowUpdates, SampledTokens


class VerifiedStep(NamedTuple):
    """A computed step. Its draft tokens are verified, and its sampled tokens are written to the batch. Items are those
    of ``StepInput``. Arrays are ``[items]`` int32."""

    rows: np.ndarray
    """Row number of each item."""
    starts: np.ndarray
    """Position of the first computed token of each item."""
    lengths: np.ndarray
    """Number of computed tokens of each item, without draft tokens."""
    drafts: np.ndarray
    """Number of draft tokens of each item."""
    sampled: dict[int, SampledTokens]
    """Row → sampled tokens. Rows that did not sample are absent."""
    forks: dict[int, list[int]]
    """Parent row → rows forked in this step."""
    hidden: Tensor
    """Hidden states, ``[tokens, hidden]`` in the model's dtype. If the drafter ``needs_all_hidden_states``: last hidden
    states of all tokens, including draft tokens. Otherwise: last hidden states of the tokens needed for sampling. For a
    model with ``aux_hidden_state_layers``: concatenated hidden states of these layers, for all tokens."""
    accepted: dict[int, list[int]]
    """Row → indices of the accepted draft tokens, for rows with trees."""


class DraftBuilder:
    """Builds the drafts of several rows, one token at a time.

    Args:
        count: number of rows.
    """

    def __init__(self, count: int) -> None:
        self.token_ids: list[list[int] | None] = [[] for _ in range(count)]
        """Draft of each row; None if drafting has failed (see ``step.Propose``)."""

    def add(self, index: int, sampled: SampledTokens) -> int | None:
        """Append a sampled token to the draft of row ``index``, and return the token. Returns None if sampling failed,
        which ends the draft. If the drafter's logits are not finite, the draft of the row becomes None."""
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
    """True if ``after_step`` needs the hidden states of all tokens of a step."""

    def init_cache(self, blocks: int) -> None:
        """Allocate the drafter's KV cache.

        Args:
            blocks: number of blocks of the model's KV cache. A sequence uses the same block numbers in both caches.
        """
        ...

    def apply(self, updates: RowUpdates) -> None:
        """Apply row updates to the drafter's state. The worker has applied them to the batch before."""
        ...

    def propose(
        self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray, trees: np.ndarray
    ) -> list[list[int] | None]:
        """Draft tokens for rows. See ``step.Propose`` for the arguments and the result."""
        ...

    def after_step(self, step: VerifiedStep) -> None:
        """Update the state of the drafter with the tokens and hidden states of a step."""
        ...

    def reset(self) -> None:
        """Discard all computed state. Called after an error, as the state may then differ between ranks."""
        ...
