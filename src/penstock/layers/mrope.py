"""M-RoPE: rotary positions in time, height and width (Qwen2-VL; Wang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class MRoPE:
    """Rows of a rotary table for tokens with three positions.

    Each pair of a head's elements is rotated by one of the three. Tokens whose positions are all equal, as those of
    text are, use the row of that position. For others the row is composed, behind those of positions, so that attention
    needs to know nothing but the number of the row.

    Args:
        table: ``[max_len + composed, head_dim]`` float32, of ``layers.rope.rope_table``, with room for composed rows.
        max_len: number of positions.
        sections: numbers of pairs that are rotated by time, height and width.
        interleaved: take turns with the three, as long as their numbers last, and leave the other pairs to time
            (Qwen3-VL); else one comes after the other.
        alternating: ``sections`` are of height, width and time, and the former two take turns, as many pairs each,
            before time (ERNIE 4.5 VL).
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
        self._axes = torch.cat((axes, axes)).to(table.device)  # of cosines, and of sines
        self._elements = torch.arange(table.shape[1], device=table.device)

    def rows(self, positions: np.ndarray) -> Tensor:
        """The row of each token, ``[tokens]`` int64, once the rows that were composed for this step are written.

        Args:
            positions: ``[3, tokens]`` int64: in time, height and width.
        """
        composed = np.flatnonzero((positions != positions[0]).any(0))
        rows = positions[0].copy()
        rows[composed] = self._max_len + np.arange(len(composed))
        each = torch.from_numpy(np.ascontiguousarray(positions[:, composed].T)).to(self._table.device)
        self._table[self._max_len : self._max_len + len(composed)] = self._table[each[:, self._axes], self._elements]
        return torch.from_numpy(rows)
