"""Locations of modules in a checkpoint. A checkpoint may use other names, or store several matrices in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.checkpoint.model_config import ModelConfig


@dataclass(frozen=True)
class Stored:
    """Location of a matrix, and its bias, in the checkpoint."""

    name: str
    """Name in the checkpoint, without ``.weight``."""
    total: int = 0
    """Number of rows of the tensor; 0: same as the matrix."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Row ranges (first, end) of the tensor that form the matrix, in order; empty: all rows."""
    other: str = ""
    """Alternative name, for checkpoints without ``name``."""

    def rows(self, wanted: tuple[int, int]) -> list[tuple[int, int]]:
        """Row ranges (first, end) of the tensor for the rows from ``wanted[0]`` to ``wanted[1]`` of the matrix."""
        found, ends = [], accumulate(end - first for first, end in self.ranges)
        for (first, end), matrix_end in zip(self.ranges, ends, strict=True):
            before = matrix_end - (end - first)
            low, high = max(wanted[0], before), min(wanted[1], matrix_end)
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


def find_grouped_qkv(config: ModelConfig, fused: str, part: str, groups: int) -> Stored:
    """Location of queries, keys or values in a tensor that has, for each group of query heads in turn, their queries,
    then their key and their value.

    Args:
        fused: name of the tensor.
        part: ``q``, ``k`` or ``v``.
        groups: number of groups, the number of key-value heads.
    """
    shared, dim = config.num_heads // groups, config.checkpoint_head_dim
    first, count = {"q": (0, shared), "k": (shared, 1), "v": (shared + 1, 1)}[part]
    starts = [(group * (shared + 2) + first) * dim for group in range(groups)]
    ranges = tuple((start, start + count * dim) for start in starts)
    return Stored(fused, groups * (shared + 2) * dim, ranges)


def part_of(name: str, sizes: Sequence[int], number: int) -> Stored:
    """Location of one of several matrices that are stacked in a tensor.

    Args:
        sizes: number of rows of each matrix.
        number: index of the matrix.
    """
    first = sum(sizes[:number])
    return Stored(name, sum(sizes), ((first, first + sizes[number]),))
