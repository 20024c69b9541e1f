"""Ops of state space models (Mamba 2)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .. import _kernels
from ..batch import Batch
from ..states import StateSpaceSizes
from .dtypes import DTYPE_CODES
from .graph import empty
from .states import keep_inputs, num_sequences, state_rows


def state_space(
    xbc: Tensor,
    steps: Tensor,
    log_decay: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    sizes: StateSpaceSizes,
    cache: Mapping[str, Tensor],
    batch: Batch,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.state_space``. In the terms of linear attention, C, B and x are queries, keys and values."""
    values, keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.state_size
    out = empty((xbc.shape[0], values), xbc.dtype) if out is None else out
    assert xbc.stride(1) == steps.stride(1) == out.stride(1) == 1
    rows = state_rows(batch)
    _kernels.linear_attention(
        rows,
        xbc.data_ptr(),
        steps.data_ptr(),
        out.data_ptr(),
        cache["state"].data_ptr(),
        cache["xbc"].data_ptr(),
        cache["steps"].data_ptr(),
        log_decay.data_ptr(),
        step_bias.data_ptr(),
        skip.data_ptr(),
        num_sequences(batch),
        xbc.stride(0),
        steps.stride(0),
        out.stride(0),
        xbc.shape[1],
        steps.shape[1],
        cache["xbc"].shape[1],
        sizes.heads,
        sizes.heads // sizes.groups,
        sizes.state_size,
        sizes.head_dim,
        values + keys,
        values,
        0,
        0,
        1.0,
        0.0,
        sizes.min_step,
        sizes.max_step,
        False,
        1.0,
        1,
        0,
        DTYPE_CODES[xbc.dtype],
    )
    keep_inputs(rows, xbc, cache["xbc"], batch)
    keep_inputs(rows, steps, cache["steps"], batch)
    return out


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    """See ``reference.concatenate``."""
    assert x.is_contiguous() and y.is_contiguous()
    out = empty((x.shape[0], x.shape[1] + y.shape[1]), x.dtype)
    sizes = x.shape[1] * x.element_size(), y.shape[1] * y.element_size()
    _kernels.concatenate(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.shape[0], *sizes)
    return out
