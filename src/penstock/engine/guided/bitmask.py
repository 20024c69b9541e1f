"""Bitmasks of allowed tokens for a step, filled in a thread while the model computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .backend import Guide

logger = logging.getLogger(__name__)


class BitmaskBuilder:
    """Fills the grammar bitmasks of steps in a thread.

    Args:
        vocab_size: number of tokens of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self._row_size = -(-vocab_size // 32)
        self._thread = ThreadPoolExecutor(1, "bitmask")

    def submit(self, guides: Sequence[tuple[Guide | None, list[int]]]) -> Future[np.ndarray] | None:
        """Start to fill the bitmask of a step, ``[rows, ceil(vocabulary / 32)]`` int32. Returns its future, or None if
        every token is allowed in every row.

        Args:
            guides: guide and draft tokens of each sequence. A sequence has ``len(draft) + 1`` rows.
        """
        constrained = any(guide and (draft or not guide.is_unconstrained) for guide, draft in guides)
        return self._thread.submit(self._fill, list(guides)) if constrained else None

    def _fill(self, guides: list[tuple[Guide | None, list[int]]]) -> np.ndarray:
        rows = np.full((sum(1 + len(draft) for _, draft in guides), self._row_size), -1, np.int32)
        first = 0
        for guide, draft in guides:
            state = guide.copy() if guide and draft else guide
            for row, token in enumerate((*draft, None), first):
                try:
                    if state and not state.is_unconstrained:
                        state.fill_bitmask(rows[row])
                    if state and token is not None:
                        state.accept_token(token)
                except Exception:  # without an allowed token, only this sequence ends
                    logger.exception("the grammar of a sequence failed, which ends the sequence")
                    rows[row : first + 1 + len(draft)] = 0
                    break
            first += 1 + len(draft)
        return rows
