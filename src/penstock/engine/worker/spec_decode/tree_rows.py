"""Rows of the batch for the paths of token trees.

All tokens of a tree are computed in one step, each with its own path from the root as context. For the attention
kernels a path is a sequence like any other: a row whose block table is that of the tree's sequence, but for its last
blocks, which are scratch blocks with copies of the keys and values of those tokens that paths share. So keys are read
in the order of their positions, and every token has the bits that it would have without a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from penstock.config.token_tree import depths, segments

from ..input_batch import InputBatch


class SlotCopies(NamedTuple):
    """Copies of keys and values, ``[copies]`` int64 each, as of ``ops.copy_slots``."""

    sources: np.ndarray
    targets: np.ndarray


class TreePaths:
    """The paths of one sequence's tree, each with the nodes that no path before it has: their *own* ones.

    Args:
        rows: of the batch, one for each path; the first is the sequence's own.
        first: position of the keys and values of the root's children.
    """

    def __init__(self, batch: InputBatch, block_size: int, rows: list[int], parents: Sequence[int], first: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self.parents = parents
        self.token_ids: Sequence[int] = ()
        """Of the nodes, once written."""
        self.accepted: list[int] = []
        """The nodes that were accepted, once verified."""
        self.rows = rows
        self.own_nodes = segments(parents)
        self.depths = depths(parents)
        self._first = first
        self._path_of = [i for i, nodes in enumerate(self.own_nodes) for _ in nodes]

    def row(self, node: int) -> int:
        """The row in which a node is computed."""
        return self.rows[self._path_of[node]]

    def position(self, node: int) -> int:
        """Position of a node's key and value."""
        return self._first + self.depths[node] - 1

    def write(self, tokens: Sequence[int], length: int) -> None:
        """Write tokens, one for each node, to the rows.

        Args:
            length: tokens of the sequence.
        """
        self.token_ids = tokens
        for node, token in enumerate(tokens):
            self._batch.tokens[self.row(node), length + self.depths[node] - 1] = token

    def ancestors(self, node: int) -> list[int]:
        """The path to a node, which is its last."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def prefix_copies(self) -> SlotCopies:
        """Copies of the sequence's tokens that are in one block with tokens of the tree."""
        positions = np.arange(self._first // self._block_size * self._block_size, self._first)
        sources = self._slots(self.rows[0], positions)
        targets = [self._slots(row, positions) for row in self.rows[1:]]
        return SlotCopies(np.tile(sources, len(targets)), np.concatenate([np.zeros(0, np.int64), *targets]))

    def node_copies(self, depth: int | None = None) -> SlotCopies:
        """Copies of nodes that several paths share, to all but the first of these paths.

        Args:
            depth: of the nodes; None is any.
        """
        sources, targets = list[int](), list[int]()
        for row, nodes in zip(self.rows[1:], self.own_nodes[1:], strict=True):
            for node in self.ancestors(nodes[0])[:-1]:
                if depth in (None, self.depths[node]):
                    sources.append(self.slot(self.row(node), node))
                    targets.append(self.slot(row, node))
        return SlotCopies(np.array(sources, np.int64), np.array(targets, np.int64))

    def accepted_copies(self) -> SlotCopies:
        """Copies of accepted nodes to the sequence's own blocks, where they are not there."""
        moved = [node for node in self.accepted if self._path_of[node]]
        sources = [self.slot(self.row(node), node) for node in moved]
        targets = [self.slot(self.rows[0], node) for node in moved]
        return SlotCopies(np.array(sources, np.int64), np.array(targets, np.int64))

    def slot(self, row: int, node: int) -> int:
        """Slot of a node's key and value in a row's blocks."""
        return int(self._slots(row, np.array([self.position(node)]))[0])

    def _slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        blocks, offsets = np.divmod(positions, self._block_size)
        slots: np.ndarray = self._batch.tables[row, blocks].astype(np.int64) * self._block_size + offsets
        return slots


class TreeMemory:
    """What the worker keeps for the paths of trees: rows of the batch, and scratch blocks, which are of no sequence.

    Args:
        rows: those of the batch that stand for paths.
        num_blocks: number of scratch blocks.
    """

    def __init__(self, batch: InputBatch, block_size: int, rows: range, num_blocks: int) -> None:
        self.batch = batch
        self.block_size = block_size
        self.rows = rows
        self.blocks = range(num_blocks)
        """The scratch blocks."""

    def init_cache(self, num_blocks: int) -> None:
        """Take the last ones of the KV cache's blocks."""
        self.blocks = range(num_blocks - len(self.blocks), num_blocks)

    def new_rows(self) -> TreeRows:
        """All rows and scratch blocks, for the trees of one step or of one call of a drafter."""
        return TreeRows(self)


class TreeRows:
    """Rows and scratch blocks for the trees of one step, or of one call of a drafter."""

    def __init__(self, memory: TreeMemory) -> None:
        self._memory = memory
        self._rows, self._blocks = iter(memory.rows), iter(memory.blocks)

    def add(self, row: int, parents: Sequence[int], first: int) -> TreePaths:
        """Take rows and blocks for a tree of the sequence in ``row``; arguments as of ``TreePaths``."""
        batch, block_size = self._memory.batch, self._memory.block_size
        found = depths(parents)
        rows = [row]
        for nodes in segments(parents)[1:]:
            path = next(self._rows)
            batch.copy_row(path, row)
            last = first + found[nodes[-1]] - 1
            for block in range(first // block_size, last // block_size + 1):
                batch.tables[path, block] = next(self._blocks)
            rows.append(path)
        return TreePaths(batch, block_size, rows, parents, first)


def with_paths(
    trees: Mapping[int, TreePaths],
    rows: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    num_states: np.ndarray,
    first_states: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Arguments of ``InputBatch.flatten`` with an item for each path of a tree, after the item of its sequence: tokens
    and states stay in the order of the nodes.

    Args:
        trees: by row.
    """
    items: list[tuple[int, int, int, int, bool]] = []
    firsts = repeat(False, len(rows)) if first_states is None else first_states.tolist()
    columns = (rows.tolist(), starts.tolist(), lengths.tolist(), num_states.tolist(), firsts)
    for row, start, length, states, first in zip(*columns, strict=True):
        if not (tree := trees.get(row)):
            items.append((row, start, length, states, first))
            continue
        rest = sum(map(len, tree.own_nodes[1:]))
        items.append((row, start, length - rest, states - rest, first))
        for path, nodes in zip(tree.rows[1:], tree.own_nodes[1:], strict=True):
            items.append((path, tree.position(nodes[0]), len(nodes), len(nodes), False))
    numbers = [np.array(column, np.int64) for column in zip(*[item[:4] for item in items], strict=True)]
    given = None if first_states is None else np.array([item[4] for item in items])
    return numbers[0], numbers[1], numbers[2], numbers[3], given


def joined(copies: Iterable[SlotCopies]) -> SlotCopies:
    """Several copies as one."""
    sources, targets = zip(*copies, strict=True)
    return SlotCopies(np.concatenate(sources), np.concatenate(targets))
