"""Lightning attention."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .. import _kernels
from ..batch import Batch
from .dtypes import DTYPE_CODES
from .graph import empty
from .states import keep_inputs, num_sequences, state_rows


def lightning_attention(
    qkv: Tensor, decay: Tensor, cache: Mapping[str, Tensor], batch: Batch, out: Tensor | None = None
) -> Tensor:
    """See ``reference.lightning_attention``."""
    rows, kept, size, heads = state_rows(batch), cache["qkv"], qkv.shape[1] // 3, len(decay)
    out = empty((qkv.shape[0], size), qkv.dtype) if out is None else out
    assert qkv.stride(1) == out.stride(1) == 1
    _kernels.linear_attention(
        rows,
        qkv.data_ptr(),
        0,
        out.data_ptr(),
        cache["state"].data_ptr(),
        kept.data_ptr(),
        0,
        0,
        0,
        0,
        num_sequences(batch),
        qkv.stride(0),
        0,
        out.stride(0),
        3 * size,
        0,
        kept.shape[1],
        heads,
        1,
        size // heads,
        size // heads,
        0,
        size,
        2 * size,
        0,
        1.0,
        0.0,
        0.0,
        float("inf"),
        False,
        1.0,
        1,
        decay.data_ptr(),
        DTYPE_CODES[qkv.dtype],
    )
    keep_inputs(rows, qkv, kept, batch)
    return out
