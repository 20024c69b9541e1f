"""Ops with recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import _kernels
from ..batch import Batch
from ..states import DeltaSizes
from .dtypes import DTYPE_CODES
from .graph import empty


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    cache: Mapping[str, Tensor],
    batch: Batch,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.short_convolution``."""
    kernel, channels = weight.shape
    rows, state, kept = state_rows(batch), cache["conv"], cache["conv_in"]
    out = empty((x.shape[0], channels), x.dtype) if out is None else out
    assert kernel <= _kernels.MAX_KERNEL and x.stride(1) == out.stride(1) == 1 and weight.is_contiguous()
    _kernels.convolution(
        rows,
        x.data_ptr(),
        out.data_ptr(),
        state.data_ptr(),
        kept.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        num_sequences(batch),
        x.stride(0),
        out.stride(0),
        channels,
        kernel,
        kept.shape[1],
        silu,
        DTYPE_CODES[x.dtype],
    )
    keep_inputs(rows, x, kept, batch)
    return out


def gated_delta_rule(
    qkv: Tensor,
    gates: Tensor,
    log_decay: Tensor,
    gate_bias: Tensor,
    sizes: DeltaSizes,
    cache: Mapping[str, Tensor],
    batch: Batch,
) -> Tensor:
    """See ``reference.gated_delta_rule``."""
    keys = sizes.key_heads * sizes.key_dim
    out = empty((qkv.shape[0], sizes.value_heads * sizes.value_dim), qkv.dtype)
    rows = state_rows(batch)
    _kernels.linear_attention(
        rows,
        qkv.data_ptr(),
        gates.data_ptr(),
        out.data_ptr(),
        cache["state"].data_ptr(),
        cache["qkv"].data_ptr(),
        cache["gates"].data_ptr(),
        log_decay.data_ptr(),
        gate_bias.data_ptr(),
        0,
        num_sequences(batch),
        qkv.stride(0),
        gates.stride(0),
        out.shape[1],
        qkv.shape[1],
        gates.shape[1],
        cache["qkv"].shape[1],
        sizes.value_heads,
        sizes.value_heads // sizes.key_heads,
        sizes.key_dim,
        sizes.value_dim,
        0,
        keys,
        2 * keys,
        sizes.value_heads,
        sizes.key_dim**-0.5,
        sizes.l2_eps,
        0.0,
        float("inf"),
        True,
        sizes.beta_scale,
        sizes.decay_dim,
        0,
        DTYPE_CODES[qkv.dtype],
    )
    keep_inputs(rows, qkv, cache["qkv"], batch)
    keep_inputs(rows, gates, cache["gates"], batch)
    return out


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_first: bool = False,
    out: Tensor | None = None,
    sigmoid: bool = False,
) -> Tensor:
    """See ``reference.gated_rms_norm``."""
    size, groups = weight.shape[-1], x.shape[1] // weight.shape[-1]
    out = empty(x.shape, x.dtype) if out is None else out
    assert x.stride(1) == gate.stride(1) == out.stride(1) == 1 and weight.dtype is x.dtype and weight.is_contiguous()
    _kernels.gated_norm(
        x.data_ptr(),
        gate.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        groups,
        size,
        x.stride(0),
        gate.stride(0),
        size if weight.dim() == 2 else 0,
        out.stride(0),
        eps,
        gate_first,
        sigmoid,
        DTYPE_CODES[x.dtype],
    )
    return out


def multiply_gate(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``reference.multiply_gate``."""
    shape, x, gate = x.shape, x.flatten(1), gate.flatten(1)
    out = empty(x.shape, x.dtype) if out is None else out
    assert x.stride(1) == gate.stride(1) == out.stride(-1) == 1
    strides = x.stride(0), gate.stride(0), out.stride(0)
    pointers = x.data_ptr(), gate.data_ptr(), out.data_ptr()
    _kernels.multiply_gate(*pointers, x.shape[0], x.shape[1], *strides, DTYPE_CODES[x.dtype])
    return out.view(shape) if out.is_contiguous() else out


def state_rows(batch: Batch) -> Any:
    """Addresses of the batch's metadata."""
    states = batch.states
    assert states
    tensors = (
        batch.attention.query_start_loc,
        states.slots,
        states.accepted,
        states.drafts,
        states.save_start_loc,
        states.save_after,
        states.save_slots,
    )
    return _kernels.StateRows(*(tensor.data_ptr() for tensor in tensors))


def num_sequences(batch: Batch) -> int:
    """Number of sequences of a batch."""
    assert batch.states
    return batch.states.slots.shape[0]


def keep_inputs(rows: Any, x: Tensor, kept: Tensor, batch: Batch) -> None:
    """Keep the inputs of drafts, if there are drafts in this engine."""
    if kept.shape[1]:
        row_bytes, stride = (number * x.element_size() for number in (x.shape[1], x.stride(0)))
        _kernels.keep_inputs(
            rows, x.data_ptr(), kept.data_ptr(), row_bytes, stride, kept.shape[1], num_sequences(batch)
        )
