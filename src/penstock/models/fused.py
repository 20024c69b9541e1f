"""Checkpoints whose projections of one input are one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from .config import ModelConfig
from .weights.renamed import Stored


def find_fused(config: ModelConfig, name: str) -> Stored:
    """``Family.find_stored`` of checkpoints with ``qkv_proj`` and ``gate_up_proj``."""
    parent, _, last = name.rpartition(".")
    if last in ("q_proj", "k_proj", "v_proj"):
        queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        return part_of(f"{parent}.qkv_proj", [queries, keys, keys], "qkv".index(last[0]))
    return find_fused_mlp(config, name)


def find_fused_mlp(config: ModelConfig, name: str) -> Stored:
    """``Family.find_stored`` of checkpoints with ``gate_up_proj``."""
    parent, _, last = name.rpartition(".")
    if last in ("gate_proj", "up_proj"):
        return part_of(f"{parent}.gate_up_proj", [config.intermediate_size] * 2, last == "up_proj")
    return Stored(name)


def part_of(name: str, sizes: Sequence[int], number: int) -> Stored:
    """One of several matrices that a tensor has one after the other, each of ``sizes`` rows."""
    first = sum(sizes[:number])
    return Stored(name, sum(sizes), ((first, first + sizes[number]),))
