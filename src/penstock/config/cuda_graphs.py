"""Batch sizes for which CUDA graphs are captured."""

from __future__ import annotations

from collections.abc import Sequence

CANDIDATES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 1025, 32))
"""Default batch sizes, as in FastDeploy."""


def capture_sizes(max_num_seqs: int, given: Sequence[int] = ()) -> list[int]:
    """Batch sizes (numbers of sequences) to capture, ascending: the ``given`` sizes up to ``max_num_seqs``. Without
    ``given``: the default sizes up to ``max_num_seqs``, and ``max_num_seqs`` (at most the largest default size)."""
    chosen = given or (*CANDIDATES, min(max_num_seqs, CANDIDATES[-1]))
    return sorted({size for size in chosen if size <= max_num_seqs})
