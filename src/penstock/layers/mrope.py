"""M-RoPE: rotary embedding with positions in time, height and width (Qwen2-VL; Wang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class MRoPE:
    """Rows of a rotary table for tokens with three positions.

    Each pair of a head's elements is rotated by one of the three positions. If they are all equal, as in text, the
    token uses the row of that position. For other tokens a row is composed and stored after the rows of all positions,
    so attention only needs the index of one row per token.

    Args:
        table: ``[max_len + composed, head_dim]`` float32 from ``layers.rope.rope_table``, with space for composed rows.
        max_len: number of positions.
        sections: number of pairs rotated by time, height and width.
        interleaved: pairs of time, height and width alternate; when the sections of height and width are used up, time
            has the remaining pairs (Qwen3-VL). False: one section after the other.
        alternating: ``sections`` are in the order height, width, time. Pairs of height and width, the same number of
            each, alternate; the pairs of time follow (ERNIE 4.5 VL).
    """

    def __init__(
        self,
        table: Tensor,
        max_len: int,
        sections: Sequence[int],
        interleaved: bool = False,
        alternating: bool = False,
    ) -> None:
        self._table = table
        self._max_len = max_len
        axes = torch.arange(3).repeat_interleave(torch.tensor(sections))
        if alternating:
            axes = torch.tensor([1, 2] * sections[0] + [0] * sections[2])
        if interleaved:
            axes.zero_()
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = axis
        self._axes = torch.cat((axes, axes)).to(table.device)  # a row has cosines, then sines
        self._elements = torch.arange(table.shape[1], device=table.device)

    def rows(self, positions: np.ndarray) -> Tensor:
        """Compose the rows of this step. Returns the index of each token's row, ``[tokens]`` int64.

        Args:
            positions: ``[3, tokens]`` int64: positions in time, height and width.
        """
        composed = np.flatnonzero((positions != positions[0]).any(0))
        rows = positions[0].copy()
        rows[composed] = self._max_len + np.arange(len(composed))
        each = torch.from_numpy(np.ascontiguousarray(positions[:, composed].T)).to(self._table.device)
        self._table[self._max_len : self._max_len + len(composed)] = self._table[each[:, self._axes], self._elements]
        return torch.from_numpy(rows)
