"""The batch sizes for which CUDA graphs are captured."""

from __future__ import annotations

from collections.abc import Sequence

CANDIDATES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 1025, 32))
"""FastDeploy's list."""


def capture_sizes(max_num_seqs: int, given: Sequence[int] = ()) -> list[int]:
    """Numbers of sequences to capture a graph for, ascending; the largest is ``max_num_seqs`` where none are given.

    Args:
        given: those that the user has chosen; larger ones than ``max_num_seqs`` are left out.
    """
    chosen = given or (*CANDIDATES, min(max_num_seqs, CANDIDATES[-1]))
    return sorted({size for size in chosen if size <= max_num_seqs})
