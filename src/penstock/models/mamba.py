"""Readers of Mamba 2 layers in ``config.json`` and in checkpoints, for several families. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.model_config import LayerKind, ModelConfig, activation_of
from penstock.checkpoint.state_config import Mamba2Config
from penstock.core import Code, PenstockError

from .stored import Stored, part_of

KERNELS = range(2, 9)
"""Supported lengths of the short convolution."""
MAX_STATE_SIZE = 256
LAYER_KINDS: dict[str, LayerKind] = {
    "linear_attention": "state",
    "mamba": "state",
    "full_attention": "attention",
    "attention": "attention",
}
"""Entry of ``layer_types``, in files of transformers 5 and 4 → kind of the layer."""


def read_mamba2(
    raw: Mapping[str, Any], inner: int, prefix: str = "mamba_", activation: str = "hidden_act", **fields: Any
) -> Mamba2Config:
    """The Mamba 2 layers of a ``config.json`` with the field names of Bamba: ``mamba_n_heads``, ``mamba_d_head`` etc.

    Args:
        inner: number of elements of all heads.
        activation: name of the field with the activation after the convolution and of the gate.
        fields: fields of ``Mamba2Config`` that override those of ``raw``.
    """
    if not {"heads", "head_dim"} & fields.keys():
        heads, head_dim = int(raw["mamba_n_heads"]), raw.get("mamba_d_head") or "auto"
        fields |= {"heads": heads, "head_dim": inner // heads if head_dim == "auto" else int(head_dim)}
        fields |= {"groups": int(raw["mamba_n_groups"]), "state_size": int(raw["mamba_d_state"])}
        fields |= {"kernel": int(raw["mamba_d_conv"])}
    bias = bool(raw.get("mamba_proj_bias"))
    low, high = step_limits(raw)
    given = {
        "convolution_bias": bool(raw.get("mamba_conv_bias", True)),
        "input_bias": bias,
        "output_bias": bias,
        "min_step": low,
        "max_step": high,
    }
    config = Mamba2Config(**given | fields)
    _check(config, inner)
    if activation_of(str(raw.get(activation) or "silu")) != "silu":
        message = f"{activation} is {raw[activation]!r:.40}; Mamba 2 layers are supported only with silu"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return config


def _check(config: Mamba2Config, inner: int) -> None:
    sizes = config.heads, config.head_dim, config.groups, config.state_size
    if min(sizes) < 1 or config.heads * config.head_dim != inner or config.heads % config.groups:
        message = f"{config.heads} heads of {config.head_dim} elements in {config.groups} groups: there must be {inner}"
        raise ValueError(f"the Mamba layers have {message} elements, and the same number of heads in each group")
    if config.kernel not in KERNELS or config.state_size > MAX_STATE_SIZE:
        message = f"the Mamba layers have a convolution of {config.kernel} tokens and states of {config.state_size}"
        most = f"{KERNELS.start} to {KERNELS.stop - 1} tokens, and states of up to {MAX_STATE_SIZE}"
        raise PenstockError(Code.UNSUPPORTED, f"{message} elements; supported are {most}", "model")


def step_limits(raw: Mapping[str, Any]) -> tuple[float, float]:
    """``time_step_limit``. Files of transformers 5 have an object in place of infinity."""
    low, high = raw.get("time_step_limit") or (0.0, float("inf"))
    return float(low), float(high["__float__"] if isinstance(high, Mapping) else high)


def layer_kinds(types: list[str]) -> tuple[LayerKind, ...]:
    """``ModelConfig.layer_kinds`` from ``layer_types``.

    Raises ``ValueError`` for an unknown type.
    """
    if unknown := set(types).difference(LAYER_KINDS):
        raise ValueError(f"layer type {sorted(unknown)[0]!r:.40} is unknown; known are {', '.join(LAYER_KINDS)}")
    return tuple(LAYER_KINDS[each] for each in types)


def find_mamba2(config: ModelConfig, name: str) -> Stored:
    """``Family.find_stored`` of the parts of ``in_proj`` and ``conv1d``."""
    parent, _, last = name.rpartition(".")
    state = config.state
    if not isinstance(state, Mamba2Config):
        return Stored(name)
    values, keys = state.heads * state.head_dim, state.groups * state.state_size
    matrix, _, part = last.rpartition("_")
    if matrix == "in_proj":
        return part_of(f"{parent}.in_proj", [values, values, keys, keys, state.heads], "z x b c dt".split().index(part))
    if matrix == "conv1d":
        return part_of(f"{parent}.conv1d", [values, keys, keys], "xbc".index(part))
    return Stored(name)
