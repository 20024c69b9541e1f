"""Recurrences with one or several states per channel, token by token, and products of rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import ACTIVATIONS
from ..batch import Batch
from ..scans import ScanWeights
from .states import Parts, scan_sequences


def multiply(x: Tensor, gate: Tensor, function: str = "", out: Tensor | None = None) -> Tensor:
    """``x * function(gate)``, or ``x * gate``, computed in float32.

    Args:
        x: ``[tokens, size]``.
        gate: same shape as ``x``.
        function: a key of ``ACTIVATIONS``; "": none.
        out: destination of the result.
    """
    factor = ACTIVATIONS[function](gate.float()) if function else gate.float()
    result = (x.float() * factor).to(x.dtype)
    return result if out is None else out.copy_(result)


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
    """Selective scan (Gu and Dao, 2023, "Mamba"). For each channel with input x and the states h, ``[state_size]``
    float32::

        step = softplus(steps + step_bias)
        h = exp(step * rates) * h + step * x * b
        output = (sum(h * c) + skip * x) * silu(gate)

    Args:
        x: ``[tokens, channels]``.
        steps: ``[tokens, channels]``.
        b: ``[tokens, state_size]``.
        c: ``[tokens, state_size]``.
        gate: ``[tokens, channels]``.
        cache: ``state``: ``[slots, state_size, channels]`` float32; ``x``, ``steps`` and ``b``.
        out: destination of the result.

    Returns ``[tokens, channels]``.
    """
    names = ("state", "x", "steps", "b")
    inputs, kept = {"x": x, "steps": steps, "b": b, "c": c}, {name: cache[name] for name in names}
    kept["c"] = torch.zeros_like(kept["b"])  # outputs of accepted drafts are not computed again

    def scan(state: Parts, given: Parts) -> Tensor:
        states, values = state["state"], given["x"].float()
        step = F.softplus(given["steps"].float() + weights.step_bias)
        decay = torch.exp(step[:, None] * weights.rates)
        change = (step * values)[:, None] * given["b"].float()[:, :, None]
        outputs = []
        for decay_t, change_t, c_t in zip(decay, change, given["c"].float(), strict=True):
            states.mul_(decay_t).add_(change_t)
            outputs.append((states * c_t[:, None]).sum(0))
        return torch.stack(outputs) + values * weights.skip

    result = (scan_sequences(scan, kept, inputs, batch) * F.silu(gate.float())).to(x.dtype)
    return result if out is None else out.copy_(result)


def rg_lru(
    x: Tensor,
    gates: Tensor,
    rates: Tensor,
    bias: Tensor,
    cache: Mapping[str, Tensor],
    batch: Batch,
    out: Tensor | None = None,
) -> Tensor:
    """Real-gated linear recurrent unit (De et al., 2024, "Griffin"). For each channel with input x, gates i and r, and
    the state h, float32::

        a = exp(sigmoid(r) * rate)
        h = a * h + sqrt(1 - a^2) * sigmoid(i) * x
        output = h

    The first token of a sequence sets ``h = sigmoid(i) * x``.

    Args:
        x: ``[tokens, heads * width]``.
        gates: ``[tokens, heads, 2 * width]``: for each head i, then r, without bias.
        rates: ``[heads, width]`` float32.
        bias: ``[heads, 2 * width]`` float32, added to the gates.
        cache: ``state``: ``[slots, heads, width]`` float32; ``x`` and ``gates``.
        out: destination of the result.

    Returns ``[tokens, heads * width]``.
    """
    heads, width = rates.shape
    inputs = {"x": x, "gates": gates, "is_first": batch.positions[:, None] == 0}
    kept = {name: cache[name] for name in ("state", "x", "gates")}
    kept["is_first"] = torch.zeros(*kept["x"].shape[:2], 1, dtype=torch.bool, device=x.device)  # drafts follow a prompt

    def scan(state: Parts, given: Parts) -> Tensor:
        input_gate, decay_gate = (given["gates"].float() + bias).sigmoid().split(width, -1)
        values = given["x"].float().unflatten(-1, (heads, width)) * input_gate
        log_decay = decay_gate * rates
        scale = (1 - torch.exp(2 * log_decay)).sqrt()
        is_first = given["is_first"][:, :, None]
        decay, scale = log_decay.exp().masked_fill(is_first, 0), scale.masked_fill(is_first, 1)
        outputs = []
        for decay_t, value_t in zip(decay, values * scale, strict=True):
            state["state"].mul_(decay_t).add_(value_t)
            outputs.append(state["state"].clone())
        return torch.stack(outputs).flatten(1).to(x.dtype)

    result = scan_sequences(scan, kept, inputs, batch)
    return result if out is None else out.copy_(result)
