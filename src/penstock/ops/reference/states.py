"""Ops with recurrent state, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import Batch
from ..states import DeltaSizes

Parts = dict[str, Tensor]
"""State of one sequence, or inputs of consecutive tokens, by the names of ``StateSpec``."""
Scan = Callable[[Parts, Parts], Tensor]
"""Function that applies the inputs ``[tokens, ...]`` to a state, which it changes in place. Returns the outputs,
``[tokens, ...]``."""


def scan_sequences(scan: Scan, states: Mapping[str, Tensor], inputs: Parts, batch: Batch) -> Tensor:
    """Apply a scan to each sequence of a batch (see ``StateBatch``).

    Args:
        states: ``[slots, ...]`` by the names of the state's parts, and ``[slots, drafts, ...]`` by those of the inputs.
        inputs: inputs of the step's tokens, ``[tokens, ...]``.
    """
    assert batch.states
    starts, given = batch.attention.query_start_loc.tolist(), batch.states
    saves = given.save_start_loc.tolist()
    outputs = []
    for number, (slot, accepted, drafts) in enumerate(
        zip(given.slots.tolist(), given.accepted.tolist(), given.drafts.tolist(), strict=True)
    ):
        state = {name: whole[slot] for name, whole in states.items() if name not in inputs}
        if accepted:
            scan(state, {name: states[name][slot, :accepted] for name in inputs})
        own = {name: values[starts[number] : starts[number + 1]] for name, values in inputs.items()}
        length, at = starts[number + 1] - starts[number], 0
        snapshots = range(saves[number], saves[number + 1])
        for end, target in [(int(given.save_after[i]), int(given.save_slots[i])) for i in snapshots]:
            if end > at:
                outputs.append(scan(state, {name: values[at:end] for name, values in own.items()}))
                at = end
            for name, part in state.items():
                states[name][target] = part
        kept = length - drafts
        if kept > at:
            outputs.append(scan(state, {name: values[at:kept] for name, values in own.items()}))
        if drafts:
            trailing = {name: values[kept:] for name, values in own.items()}
            outputs.append(scan({name: part.clone() for name, part in state.items()}, trailing))
            for name, values in trailing.items():
                states[name][slot, :drafts] = values
    return torch.cat(outputs)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    cache: Mapping[str, Tensor],
    batch: Batch,
    out: Tensor | None = None,
) -> Tensor:
    """Causal convolution of each channel over the last ``kernel`` tokens.

    Args:
        x: ``[tokens, channels]``.
        weight: ``[kernel, channels]`` float32; the last row is that of the token itself.
        bias: ``[channels]`` float32.
        silu: apply SiLU to the result.
        cache: ``conv``: ``[slots, kernel - 1, channels]``, the inputs before the next token; ``conv_in``.
        out: destination of the result.

    Returns ``[tokens, channels]``.
    """
    kernel = weight.shape[0]

    def scan(state: Parts, inputs: Parts) -> Tensor:
        whole = torch.cat((state["conv"], inputs["conv_in"]))
        windows = whole.unfold(0, kernel, 1).float()
        sums = (windows * weight.T).sum(-1)
        state["conv"].copy_(whole[whole.shape[0] - (kernel - 1) :].clone())
        sums = sums if bias is None else sums + bias
        return (F.silu(sums) if silu else sums).to(x.dtype)

    names = ("conv", "conv_in")
    result = scan_sequences(scan, {name: cache[name] for name in names}, {"conv_in": x}, batch)
    return result if out is None else out.copy_(result)


def gated_delta_rule(
    qkv: Tensor,
    gates: Tensor,
    log_decay: Tensor,
    gate_bias: Tensor,
    sizes: DeltaSizes,
    cache: Mapping[str, Tensor],
    batch: Batch,
) -> Tensor:
    """Linear attention by the gated delta rule (Yang et al., 2024, "Gated Delta Networks"). For each value head, with
    normalized query q and key k, and the state S, ``[key_dim, value_dim]`` float32::

        S = exp(-exp(log_decay) * softplus(a + gate_bias)) * S
        S = S + k (beta_scale * sigmoid(b) * (v - S^T k))^T
        output = S^T q / sqrt(key_dim)

    Args:
        qkv: ``[tokens, channels]``: all queries, keys and values. Each query and key head serves consecutive value
            heads.
        gates: ``[tokens, (1 + decay_dim) * value_heads]``: b of all heads, then a of all heads. With ``decay_dim``
            above 1, each row of S has a separate a (Kimi Team, 2025, "Kimi Linear").
        log_decay: ``[value_heads]`` float32.
        gate_bias: ``[value_heads * decay_dim]`` float32.
        cache: ``state``: ``[slots, value_heads, key_dim, value_dim]`` float32; ``qkv`` and ``gates``.

    Returns ``[tokens, value_heads * value_dim]``.
    """
    groups = sizes.value_heads // sizes.key_heads
    keys = sizes.key_heads * sizes.key_dim

    def heads(part: Tensor) -> Tensor:
        part = part.unflatten(-1, (sizes.key_heads, sizes.key_dim))
        part = part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + sizes.l2_eps)
        return part.repeat_interleave(groups, 1)

    def scan(state: Parts, inputs: Parts) -> Tensor:
        given, matrix = inputs["qkv"].float(), state["state"]
        q, k = heads(given[:, :keys]) * sizes.key_dim**-0.5, heads(given[:, keys : 2 * keys])
        v = given[:, 2 * keys :].unflatten(-1, (sizes.value_heads, sizes.value_dim))
        b, a = inputs["gates"].float().tensor_split((sizes.value_heads,), -1)
        steps = F.softplus(a + gate_bias).unflatten(-1, (sizes.value_heads, sizes.decay_dim))
        decay = torch.exp(-log_decay.exp()[:, None] * steps)
        outputs = []
        for q_t, k_t, v_t, decay_t, beta_t in zip(q, k, v, decay, b.sigmoid() * sizes.beta_scale, strict=True):
            matrix *= decay_t[:, :, None]
            change = (v_t - (matrix * k_t[:, :, None]).sum(1)) * beta_t[:, None]
            matrix += k_t[:, :, None] * change[:, None, :]
            outputs.append((matrix * q_t[:, :, None]).sum(1))
        return torch.stack(outputs).flatten(1).to(qkv.dtype)

    names = ("state", "qkv", "gates")
    return scan_sequences(scan, {name: cache[name] for name in names}, {"qkv": qkv, "gates": gates}, batch)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_first: bool = False,
    out: Tensor | None = None,
    sigmoid: bool = False,
) -> Tensor:
    """RMS norm over groups of ``size`` elements, multiplied by SiLU of the gate.

    Args:
        x: ``[tokens, groups * size]``.
        gate: same shape as ``x``.
        weight: ``[size]`` of all groups, or ``[groups, size]``, of the model's dtype.
        gate_first: multiply by the gate before the norm (Mamba 2).
        out: destination of the result.
        sigmoid: multiply by the sigmoid of the gate instead (Kimi-Linear, MiniMax-01).
    """
    size = weight.shape[-1]
    gated, values = gate.float().sigmoid() if sigmoid else F.silu(gate.float()), x.float()
    if gate_first:
        values = values * gated
    grouped = values.unflatten(-1, (-1, size))
    normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)
    result = (normed.to(x.dtype) * weight).float().flatten(-2)
    result = (result if gate_first else result * gated).to(x.dtype)
    return result if out is None else out.copy_(result)


def multiply_gate(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """``x * sigmoid(gate)``.

    Args:
        x: ``[tokens, ...]``.
        gate: ``[tokens, size]``, as many elements as ``x``.
        out: destination of the result, ``[tokens, size]``.
    """
    result = (x.float().flatten(1) * gate.float().sigmoid()).to(x.dtype)
    return result.view(x.shape) if out is None else out.copy_(result)
