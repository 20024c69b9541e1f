"""Where a checkpoint has the modules that layers ask for: under other names, or several in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.checkpoint.model_config import ModelConfig


@dataclass(frozen=True)
class Stored:
    """Where a matrix, and its bias, lie in the checkpoint."""

    name: str
    """Without ``.weight``."""
    total: int = 0
    """Rows of the whole tensor; 0 is those of the matrix."""
    ranges: tuple[tuple[int, int], ...] = ()
    """First and end of the tensor's rows that are the matrix's, in order; empty is all."""
    other: str = ""
    """In checkpoints that lack ``name``."""

    def rows(self, wanted: tuple[int, int]) -> list[tuple[int, int]]:
        """The tensor's rows of the matrix's rows from ``wanted[0]`` to ``wanted[1]``."""
        found, ends = [], accumulate(end - first for first, end in self.ranges)
        for (first, end), own_end in zip(self.ranges, ends, strict=True):
            before = own_end - (end - first)
            low, high = max(wanted[0], before), min(wanted[1], own_end)
            if low < high:
                found.append((first + low - before, first + high - before))
        return found


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
