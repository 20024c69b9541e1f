"""Rows of the batch for the paths of token trees.

All tokens of a tree are computed in one step, each with its path from the root as context. For the attention kernels a
path is an ordinary sequence: a row with the block table of the tree's sequence, except that its last blocks are scratch
blocks, which contain copies of the keys and values of tokens that several paths share. So keys are read in the order of
their positions, and the result of each token has the same bits as without a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from penstock.config.token_tree import depths, segments

from ..input_batch import InputBatch


class SlotCopies(NamedTuple):
    """Arguments of ``ops.copy_slots``: slots to copy keys and values from and to, both ``[copies]`` int64."""

    sources: np.ndarray
    targets: np.ndarray


class TreePaths:
    """The paths of a sequence's token tree. Each node is computed in the first path that contains it.

    Args:
        rows: rows of the paths in the batch. The first path uses the row of the sequence.
        parents: parent of each node; -1 for the root.
        first: position of the keys and values of the root's children.
    """

    def __init__(self, batch: InputBatch, block_size: int, rows: list[int], parents: Sequence[int], first: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self.parents = parents
        self.token_ids: Sequence[int] = ()
        """Token ids of the nodes, set by ``write``."""
        self.accepted: list[int] = []
        """Indices of the accepted nodes, set after verification."""
        self.rows = rows
        self.new_nodes = segments(parents)
        """Nodes computed in each path, by path."""
        self.depths = depths(parents)
        self._first = first
        self._path_of = [i for i, nodes in enumerate(self.new_nodes) for _ in nodes]

    def row(self, node: int) -> int:
        """Number of the row in which a node is computed."""
        return self.rows[self._path_of[node]]

    def position(self, node: int) -> int:
        """Position of the key and value of a node in its sequence."""
        return self._first + self.depths[node] - 1

    def write(self, tokens: Sequence[int], length: int) -> None:
        """Write the token of each node to its row.

        Args:
            length: length of the sequence.
        """
        self.token_ids = tokens
        for node, token in enumerate(tokens):
            self._batch.tokens[self.row(node), length + self.depths[node] - 1] = token

    def ancestors(self, node: int) -> list[int]:
        """Nodes on the path from the root to ``node``, including ``node``."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def prefix_copies(self) -> SlotCopies:
        """Copies of the sequence's tokens in the same block as the first tokens of the tree, to the other paths."""
        positions = np.arange(self._first // self._block_size * self._block_size, self._first)
        sources = self._slots(self.rows[0], positions)
        targets = [self._slots(row, positions) for row in self.rows[1:]]
        return SlotCopies(np.tile(sources, len(targets)), np.concatenate([np.zeros(0, np.int64), *targets]))

    def node_copies(self, depth: int | None = None) -> SlotCopies:
        """Copies of nodes shared by several paths, to all but the first of these paths.

        Args:
            depth: depth of the nodes to copy; None: all depths.
        """
        sources, targets = list[int](), list[int]()
        for row, nodes in zip(self.rows[1:], self.new_nodes[1:], strict=True):
            for node in self.ancestors(nodes[0])[:-1]:
                if depth in (None, self.depths[node]):
                    sources.append(self.slot(self.row(node), node))
                    targets.append(self.slot(row, node))
        return SlotCopies(np.array(sources, np.int64), np.array(targets, np.int64))

    def accepted_copies(self) -> SlotCopies:
        """Copies of accepted nodes from the blocks of other paths to the blocks of the sequence."""
        moved = [node for node in self.accepted if self._path_of[node]]
        sources = [self.slot(self.row(node), node) for node in moved]
        targets = [self.slot(self.rows[0], node) for node in moved]
        return SlotCopies(np.array(sources, np.int64), np.array(targets, np.int64))

    def slot(self, row: int, node: int) -> int:
        """Slot of the key and value of a node in the blocks of a row."""
        return int(self._slots(row, np.array([self.position(node)]))[0])

    def _slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        blocks, offsets = np.divmod(positions, self._block_size)
        slots: np.ndarray = self._batch.tables[row, blocks].astype(np.int64) * self._block_size + offsets
        return slots


class TreeMemory:
    """Rows of the batch and scratch blocks reserved for the paths of trees.

    Args:
        rows: rows of the batch reserved for paths.
        num_blocks: number of scratch blocks.
    """

    def __init__(self, batch: InputBatch, block_size: int, rows: range, num_blocks: int) -> None:
        self.batch = batch
        self.block_size = block_size
        self.rows = rows
        self.blocks = range(num_blocks)
        """Numbers of the scratch blocks, set by ``init_cache``."""

    def init_cache(self, num_blocks: int) -> None:
        """Use the last of the KV cache's ``num_blocks`` blocks as scratch blocks."""
        self.blocks = range(num_blocks - len(self.blocks), num_blocks)

    def new_rows(self) -> TreeRows:
        """Create an allocator to which all rows and scratch blocks are free."""
        return TreeRows(self)


class TreeRows:
    """Allocates rows and scratch blocks for the trees of one step, or of one call of a drafter."""

    def __init__(self, memory: TreeMemory) -> None:
        self._memory = memory
        self._rows, self._blocks = iter(memory.rows), iter(memory.blocks)

    def add(self, row: int, parents: Sequence[int], first: int) -> TreePaths:
        """Allocate rows and blocks for a tree of the sequence in ``row``. See ``TreePaths`` for the arguments."""
        batch, block_size = self._memory.batch, self._memory.block_size
        node_depths = depths(parents)
        rows = [row]
        for nodes in segments(parents)[1:]:
            path = next(self._rows)
            batch.copy_row(path, row)
            last = first + node_depths[nodes[-1]] - 1
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
    """Arguments of ``InputBatch.flatten`` with an additional item for each further path of a tree, after the item of
    its sequence. The order of tokens and states does not change.

    Args:
        trees: row number → paths of the row's tree.
    """
    items: list[tuple[int, int, int, int, bool]] = []
    firsts = repeat(False, len(rows)) if first_states is None else first_states.tolist()
    columns = (rows.tolist(), starts.tolist(), lengths.tolist(), num_states.tolist(), firsts)
    for row, start, length, states, first in zip(*columns, strict=True):
        if not (tree := trees.get(row)):
            items.append((row, start, length, states, first))
            continue
        rest = sum(map(len, tree.new_nodes[1:]))
        items.append((row, start, length - rest, states - rest, first))
        for path, nodes in zip(tree.rows[1:], tree.new_nodes[1:], strict=True):
            items.append((path, tree.position(nodes[0]), len(nodes), len(nodes), False))
    numbers = [np.array(column, np.int64) for column in zip(*[item[:4] for item in items], strict=True)]
    given = None if first_states is None else np.array([item[4] for item in items])
    return numbers[0], numbers[1], numbers[2], numbers[3], given


def joined(copies: Iterable[SlotCopies]) -> SlotCopies:
    """Concatenate ``copies``, which must not be empty."""
    sources, targets = zip(*copies, strict=True)
    return SlotCopies(np.concatenate(sources), np.concatenate(targets))
