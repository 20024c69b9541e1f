"""Recurrences with one or several states per channel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch import Batch
from ..scans import ScanWeights
from .elementwise import power_of_two
from .kernels import scans as kernels
from .launch import launch
from .states import keep_inputs, num_sequences, state_numbers

SCAN_TILE = 512
"""States that a program has in registers; as many of their rates are there, too."""
LRU_CHANNELS = 64
"""Number of channels that a program of ``rg_lru`` computes."""


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
    (tokens, channels), size, kept = x.shape, b.shape[1], [cache[name] for name in ("x", "steps", "b")]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device) if out is None else out
    rows = (x, steps, b, c, gate, out)
    assert all(each.stride(1) == 1 for each in rows) and weights.rates.is_contiguous()
    states = power_of_two(size)
    columns = max(SCAN_TILE // states, 1)
    launch(
        kernels.selective_scan,
        (-(-channels // columns), num_sequences(batch)),
        *state_numbers(batch),
        *rows,
        cache["state"],
        *kept,
        weights.rates,
        weights.step_bias,
        weights.skip,
        *(each.stride(0) for each in rows),
        channels,
        kept[0].shape[1],
        SIZE=size,
        ROWS=states,
        COLUMNS=columns,
        num_warps=1,
    )
    for each, target in zip(rows, kept, strict=False):
        keep_inputs(batch, each, target)
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
    (tokens, channels), kept = x.shape, [cache[name] for name in ("x", "gates")]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device) if out is None else out
    gates = gates.flatten(1)
    kept[1] = kept[1].flatten(2)
    assert x.stride(1) == gates.stride(1) == out.stride(1) == 1 and rates.is_contiguous() and bias.is_contiguous()
    launch(
        kernels.rg_lru,
        (-(-channels // LRU_CHANNELS), num_sequences(batch)),
        *state_numbers(batch),
        batch.positions,
        x,
        gates,
        out,
        cache["state"],
        *kept,
        rates,
        bias,
        x.stride(0),
        gates.stride(0),
        out.stride(0),
        channels,
        kept[0].shape[1],
        WIDTH=rates.shape[1],
        COLUMNS=LRU_CHANNELS,
        num_warps=1,
    )
    keep_inputs(batch, x, kept[0])
    keep_inputs(batch, gates, kept[1])
    return out
