"""Recurrences with one or several states per channel, and products of rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .. import _kernels
from ..batch import Batch
from ..scans import ScanWeights
from .dtypes import DTYPE_CODES
from .elementwise import ACTIVATION_CODES
from .graph import empty
from .states import keep_inputs, num_sequences, state_rows


def multiply(x: Tensor, gate: Tensor, function: str = "", out: Tensor | None = None) -> Tensor:
    """See ``reference.multiply``."""
    out = empty(x.shape, x.dtype) if out is None else out
    assert x.shape == gate.shape and x.stride(1) == gate.stride(1) == out.stride(1) == 1
    pointers, strides = (x.data_ptr(), gate.data_ptr(), out.data_ptr()), (x.stride(0), gate.stride(0), out.stride(0))
    code = ACTIVATION_CODES[function] if function else -1
    _kernels.multiply_rows(*pointers, x.shape[0], x.shape[1], *strides, code, DTYPE_CODES[x.dtype])
    return out


def selective_scan(
    x: Tensor,
    steps: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor,
    weights: ScanWeights,
    cache: Mapping[str, Tensor],
    batch: Batch,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.selective_scan``."""
    out = empty(x.shape, x.dtype) if out is None else out
    rows = state_rows(batch)
    assert x.stride(1) == steps.stride(1) == b.stride(1) == c.stride(1) == gate.stride(1) == out.stride(1) == 1
    assert weights.rates.is_contiguous()
    _kernels.selective_scan(
        rows,
        x.data_ptr(),
        steps.data_ptr(),
        b.data_ptr(),
        c.data_ptr(),
        gate.data_ptr(),
        out.data_ptr(),
        cache["state"].data_ptr(),
        cache["x"].data_ptr(),
        cache["steps"].data_ptr(),
        cache["b"].data_ptr(),
        weights.rates.data_ptr(),
        weights.step_bias.data_ptr(),
        weights.skip.data_ptr(),
        num_sequences(batch),
        x.stride(0),
        steps.stride(0),
        b.stride(0),
        c.stride(0),
        gate.stride(0),
        out.stride(0),
        x.shape[1],
        b.shape[1],
        cache["x"].shape[1],
        DTYPE_CODES[x.dtype],
    )
    for each, name in ((x, "x"), (steps, "steps"), (b, "b")):
        keep_inputs(rows, each, cache[name], batch)
    return out


def rg_lru(
    x: Tensor,
    gates: Tensor,
    rates: Tensor,
    bias: Tensor,
    cache: Mapping[str, Tensor],
    batch: Batch,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.rg_lru``."""
    out = empty(x.shape, x.dtype) if out is None else out
    rows, (heads, width) = state_rows(batch), rates.shape
    assert (
        x.stride(1) == out.stride(1) == 1 and gates.is_contiguous() and rates.is_contiguous() and bias.is_contiguous()
    )
    _kernels.rg_lru(
        rows,
        x.data_ptr(),
        gates.data_ptr(),
        out.data_ptr(),
        cache["state"].data_ptr(),
        cache["x"].data_ptr(),
        cache["gates"].data_ptr(),
        rates.data_ptr(),
        bias.data_ptr(),
        batch.positions.data_ptr(),
        num_sequences(batch),
        x.stride(0),
        gates.stride(0),
        out.stride(0),
        heads,
        width,
        cache["x"].shape[1],
        DTYPE_CODES[x.dtype],
    )
    keep_inputs(rows, x, cache["x"], batch)
    keep_inputs(rows, gates.flatten(1), cache["gates"], batch)
    return out
