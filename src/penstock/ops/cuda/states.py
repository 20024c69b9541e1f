"""Ops with recurrent state: short convolution and linear attention."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch import Batch
from ..states import DeltaSizes, StateSpaceSizes
from .elementwise import COLUMNS, power_of_two
from .kernels import states as kernels
from .launch import launch

TILE = 2048
"""Elements of a head's state, or of the states of some channels, that a program has in registers: 64 for each thread of
its warp. A warp needs no barriers."""
CONVOLUTION_TOKENS, CONVOLUTION_CHANNELS = 8, 256
"""Tile of a convolution."""
SEQUENCES = 64
"""Number of sequences that a program compares with its tokens at a time."""


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
    state, kept, sequences = cache["conv"], cache["conv_in"], num_sequences(batch)
    out = torch.empty((x.shape[0], channels), dtype=x.dtype, device=x.device) if out is None else out
    assert x.stride(1) == out.stride(1) == 1 and weight.is_contiguous()
    starts, slots, accepted, *_ = numbers = state_numbers(batch)
    blocks = -(-channels // CONVOLUTION_CHANNELS)
    launch(
        kernels.convolution,
        (blocks, -(-x.shape[0] // CONVOLUTION_TOKENS)),
        starts,
        slots,
        accepted,
        x,
        kept,
        state,
        weight,
        bias,
        out,
        sequences,
        x.stride(0),
        out.stride(0),
        channels,
        kept.shape[1],
        KERNEL=kernel,
        SILU=silu,
        ROWS=CONVOLUTION_TOKENS,
        COLUMNS=CONVOLUTION_CHANNELS,
        SEQUENCES=SEQUENCES,
    )
    launch(
        kernels.convolution_state,
        (blocks, sequences),
        *numbers,
        x,
        kept,
        state,
        x.stride(0),
        channels,
        kept.shape[1],
        HISTORY=kernel - 1,
        ROWS=power_of_two(kernel - 1),
        COLUMNS=CONVOLUTION_CHANNELS,
    )
    keep_inputs(batch, x, kept)
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
    out = torch.empty((qkv.shape[0], sizes.value_heads * sizes.value_dim), dtype=qkv.dtype, device=qkv.device)
    return _linear_attention(
        qkv,
        gates,
        out,
        (cache["state"], cache["qkv"], cache["gates"]),
        batch,
        log_decay=log_decay,
        gate_bias=gate_bias,
        groups=sizes.value_heads // sizes.key_heads,
        offsets=(0, keys, 2 * keys, sizes.value_heads),
        scale=sizes.key_dim**-0.5,
        l2_eps=sizes.l2_eps,
        beta_scale=sizes.beta_scale,
        delta=True,
        by_channel=sizes.decay_dim > 1,
    )


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
    out = torch.empty((xbc.shape[0], values), dtype=xbc.dtype, device=xbc.device) if out is None else out
    return _linear_attention(
        xbc,
        steps,
        out,
        (cache["state"], cache["xbc"], cache["steps"]),
        batch,
        log_decay=log_decay,
        gate_bias=step_bias,
        skip=skip,
        groups=sizes.heads // sizes.groups,
        offsets=(values + keys, values, 0, 0),
        limits=(sizes.min_step, sizes.max_step),
    )


def lightning_attention(
    qkv: Tensor, decay: Tensor, cache: Mapping[str, Tensor], batch: Batch, out: Tensor | None = None
) -> Tensor:
    """See ``reference.lightning_attention``."""
    size = qkv.shape[1] // 3
    out = torch.empty((qkv.shape[0], size), dtype=qkv.dtype, device=qkv.device) if out is None else out
    return _linear_attention(
        qkv, None, out, (cache["state"], cache["qkv"], None), batch, decay=decay, offsets=(0, size, 2 * size, 0)
    )


def _linear_attention(
    x: Tensor,
    gates: Tensor | None,
    out: Tensor,
    cache: tuple[Tensor, Tensor, Tensor | None],
    batch: Batch,
    *,
    offsets: tuple[int, int, int, int],
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    gate_bias: Tensor | None = None,
    skip: Tensor | None = None,
    groups: int = 1,
    scale: float = 1.0,
    l2_eps: float = 0.0,
    beta_scale: float = 1.0,
    limits: tuple[float, float] = (0.0, math.inf),
    delta: bool = False,
    by_channel: bool = False,
) -> Tensor:
    """Launch the kernel, and keep the inputs of drafts.

    Args:
        cache: states, kept inputs and kept gates.
        offsets: first columns of queries, keys and values in ``x``, and of the steps in ``gates``.
        groups: number of consecutive heads with the same queries and keys.
    """
    state, kept, kept_gates = cache
    _, heads, key_dim, value_dim = state.shape
    rows = power_of_two(key_dim)
    columns = min(power_of_two(value_dim), max(TILE // rows, 1))
    assert x.stride(1) == out.stride(1) == 1 and (gates is None or gates.stride(1) == 1)
    launch(
        kernels.linear_attention,
        (-(-value_dim // columns), heads, num_sequences(batch)),
        *state_numbers(batch),
        x,
        gates,
        out,
        state,
        kept,
        kept_gates,
        decay,
        log_decay,
        gate_bias,
        skip,
        x.stride(0),
        0 if gates is None else gates.stride(0),
        out.stride(0),
        x.shape[1],
        0 if gates is None else gates.shape[1],
        kept.shape[1],
        groups,
        *offsets,
        scale,
        l2_eps,
        beta_scale,
        *limits,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        DELTA=delta,
        BY_CHANNEL=by_channel,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=1,
    )
    keep_inputs(batch, x, kept)
    if gates is not None and kept_gates is not None:
        keep_inputs(batch, gates, kept_gates)
    return out


def num_sequences(batch: Batch) -> int:
    """Number of sequences of a batch."""
    assert batch.states
    return batch.states.slots.shape[0]


def state_numbers(batch: Batch) -> tuple[Tensor, ...]:
    """First arguments of kernels with recurrent state."""
    states = batch.states
    assert states
    return (
        batch.attention.query_start_loc,
        states.slots,
        states.accepted,
        states.drafts,
        states.save_start_loc,
        states.save_after,
        states.save_slots,
    )


def keep_inputs(batch: Batch, x: Tensor, kept: Tensor) -> None:
    """Keep the inputs of drafts, if there are drafts in this engine. A separate kernel, since programs of other heads
    read the inputs of the previous step.

    Args:
        kept: ``[slots, drafts, width]``.
    """
    max_drafts, width = kept.shape[1:]
    starts, slots, _, drafts, *_ = state_numbers(batch)
    grid = -(-width // COLUMNS), max_drafts, num_sequences(batch)
    launch(kernels.keep_inputs, grid, starts, slots, drafts, x, kept, x.stride(0), width, max_drafts, BLOCK=COLUMNS)
