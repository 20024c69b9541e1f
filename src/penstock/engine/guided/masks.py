"""The masks of a step, found while the model computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .guide import Guide

logger = logging.getLogger(__name__)


class Masks:
    """Tokens that sequences may go on with, found in a thread while the model computes.

    Args:
        vocabulary: tokens of the model.
    """

    def __init__(self, vocabulary: int) -> None:
        self._words = -(-vocabulary // 32)
        self._thread = ThreadPoolExecutor(1, "masks")

    def begin(self, guides: Sequence[tuple[Guide | None, list[int]]]) -> Future[np.ndarray] | None:
        """Bits ``[rows, vocabulary / 32]`` int32; None where any token may come.

        Args:
            guides: with tokens that are guessed to come next: there is a row before and after each.
        """
        limited = any(guide and (draft or not guide.free) for guide, draft in guides)
        return self._thread.submit(self._fill, list(guides)) if limited else None

    def _fill(self, guides: list[tuple[Guide | None, list[int]]]) -> np.ndarray:
        rows = np.full((sum(1 + len(draft) for _, draft in guides), self._words), -1, np.int32)
        at = 0
        for guide, draft in guides:
            later = guide.copy() if guide and draft else guide
            for i, token in enumerate((*draft, None), at):
                try:
                    if later and not later.free:
                        later.fill(rows[i])
                    if later and token is not None:
                        later.take(token)
                except Exception:  # of another's code: it is this sequence's alone, for which no token may come
                    logger.exception("a sequence's form cannot be followed")
                    rows[i : at + 1 + len(draft)] = 0
                    break
            at += 1 + len(draft)
        return rows
