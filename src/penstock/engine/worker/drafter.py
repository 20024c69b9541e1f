"""Drafters that run a model in the worker: a draft model, or the model's own layers for multi-token prediction."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from penstock.core import Code

from ..step import RowUpdates, SampledTokens


class StepResult(NamedTuple):
    """A step that was computed, after the sampled tokens were written to the batch. Items are those of ``StepInput``,
    and its arrays are int32."""

    rows: np.ndarray
    """``[items]``"""
    starts: np.ndarray
    """``[items]``: position of the first token computed."""
    lengths: np.ndarray
    """``[items]``: tokens computed, draft tokens not counted."""
    drafts: np.ndarray
    """``[items]``: number of draft tokens, 0 where there were none."""
    draws: dict[int, SampledTokens]
    """What each row sampled, by row; rows that did not sample are missing."""
    forks: dict[int, list[int]]
    """Rows that were forked in this step, by parent row."""
    hidden: Tensor
    """``[tokens, hidden]`` in the model's dtype: the last hidden states of all tokens of all items, draft tokens
    included, where the drafter ``needs_all_hidden_states``; else only those that sampling needed."""


class Drafts:
    """Draft tokens of some rows, which are added one at a time.

    Args:
        count: number of rows.
    """

    def __init__(self, count: int) -> None:
        self.token_ids: list[list[int] | None] = [[] for _ in range(count)]
        """The answer to ``Propose``."""

    def add(self, index: int, draw: SampledTokens) -> int | None:
        """Add a draw to the draft of row ``index``; returns its token. None where the draw failed: the draft has to end
        there. Where the drafter's logits are not finite, the row's draft becomes None."""
        if not draw.failure:
            (token,) = draw.token_ids
            draft = self.token_ids[index]
            assert draft is not None
            draft.append(token)
            return token
        if draw.failure.code is Code.INTERNAL:
            self.token_ids[index] = None
        return None


class ModelDrafter(Protocol):
    """Drafts tokens for rows of the worker's batch.

    The worker calls ``apply`` before each step, ``propose`` where drafts are wanted, and ``after_step``.
    """

    needs_all_hidden_states: bool
    """Whether ``after_step`` reads the hidden states of all tokens of a step."""

    def init_cache(self, blocks: int) -> None:
        """Allocate the drafter's KV cache, of as many blocks as the model's; a sequence has the same in both."""
        ...

    def apply(self, updates: RowUpdates) -> None:
        """Take in changes of rows, which the batch has already."""
        ...

    def propose(self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> list[list[int] | None]:
        """Draft tokens (``step.Propose``, which has the arguments and the answer)."""
        ...

    def after_step(self, result: StepResult) -> None:
        """Take in a computed step."""
        ...

    def reset(self) -> None:
        """Forget what was computed, after an error: ranks may have come to different places."""
        ...
