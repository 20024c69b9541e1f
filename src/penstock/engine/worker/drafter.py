"""What drafts tokens with a model does beside the worker's steps."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from ..step import Draw, RowUpdates


class ModelDrafter(Protocol):
    """Drafts tokens for rows of the worker's batch."""

    needs_all_states: bool
    """Whether ``after_step`` reads the hidden states of all tokens of a step."""

    def init_cache(self, blocks: int) -> None:
        """Allocate its KV cache, whose blocks have the numbers of the model's."""
        ...

    def apply(self, updates: RowUpdates) -> None:
        """Rows have changed; the batch knows it already."""
        ...

    def propose(self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> list[list[int]]:
        """Draft tokens that may follow the first ``lengths`` of each row, at most so many."""
        ...

    def after_step(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        drafts: np.ndarray,
        draws: dict[int, Draw],
        forks: dict[int, list[int]],
        hidden: Tensor,
    ) -> None:
        """A step was computed, and what it sampled is in the batch.

        Args:
            rows, starts, lengths, drafts: as in ``StepInput``.
            draws: by row, of those that sampled.
            forks: rows that were forked in this step, by parent.
            hidden: of all tokens where it ``needs_all_states``.
        """
        ...
