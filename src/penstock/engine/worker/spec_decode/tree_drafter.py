"""Drafts trees of tokens with draft heads (Cai et al., 2024, Medusa; Li et al., 2024, EAGLE)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.config.token_tree import TokenTree
from penstock.core import Code

from .head_runner import HeadRunner
from .tree_rows import TreeMemory, TreePaths, joined

MISSING = -1
"""Token id of a node that could not be drafted."""


class Parent(NamedTuple):
    """A node whose children are drafted next."""

    tree: int
    """Index of the tree that contains the node."""
    node: int
    """Index of the node; -1 for the root."""


class Trees(NamedTuple):
    """The trees drafted by one call of ``TreeDrafter.propose``."""

    shapes: list[TokenTree]
    """Shape of each tree."""
    token_ids: list[list[int]]
    """Token ids of the nodes of each tree; ``MISSING`` for nodes that are not drafted."""
    failed: set[int]
    """Indices of trees for which drafting has failed."""

    def add(self, tree: int, ranked: list[int], nodes: list[int]) -> None:
        """Set the token of each of ``nodes`` to the token with its rank in ``ranked``. A node without one is left
        missing."""
        for node in nodes:
            if (rank := self.shapes[tree].nodes[node][-1]) < len(ranked):
                self.token_ids[tree][node] = ranked[rank]


class TreeDrafter:
    """Drafts token trees, one depth at a time.

    The token of rank 0 is the same as in a chain: it is sampled with the row's sampling parameters and random numbers.
    The tokens of other ranks are the most likely remaining tokens.

    Args:
        tree: shape of the trees.
        memory: rows and blocks for the paths of trees.
    """

    def __init__(self, heads: HeadRunner, tree: TokenTree, memory: TreeMemory) -> None:
        self._heads = heads
        self._tree = tree
        self._memory = memory

    def propose(
        self, rows: np.ndarray, lengths: np.ndarray, depths: np.ndarray, states: Tensor
    ) -> list[list[int] | None]:
        """Draft a tree for each row. Returns the token ids of the nodes for each row; None if the head has failed.

        Args:
            rows, lengths: row numbers and lengths of the sequences, ``[rows]`` (see ``step.Propose``).
            depths: maximum depth of each tree, ``[rows]``.
            states: hidden states of the first head at the second to last token of each row, ``[rows, hidden]``.
        """
        shapes = [self._tree.up_to(depth) for depth in depths.tolist()]
        trees = Trees(shapes, [[MISSING] * len(shape.nodes) for shape in shapes], set())
        draft = self._draft_levels if self._heads.recurrent else self._draft_ranks
        draft(trees, rows, lengths, states)
        return [None if i in trees.failed else token_ids for i, token_ids in enumerate(trees.token_ids)]

    def _draft_ranks(self, trees: Trees, rows: np.ndarray, lengths: np.ndarray, states: Tensor) -> None:
        """Draft with one head per depth (Medusa). All heads read the same states, so tokens do not depend on their
        parents."""
        for depth in range(1, max(shape.depth for shape in trees.shapes) + 1):
            found = [[i for i, node in enumerate(shape.nodes) if len(node) == depth] for shape in trees.shapes]
            parents = [Parent(i, -1) for i, nodes in enumerate(found) if nodes]
            for parent, ranked in self._ranked(depth, parents, trees, states, rows, lengths):
                trees.add(parent.tree, ranked, found[parent.tree])

    def _draft_levels(self, trees: Trees, rows: np.ndarray, lengths: np.ndarray, states: Tensor) -> None:
        """Draft depth by depth with heads that read the preceding draft tokens (EAGLE, MTP layers)."""
        new_rows = self._memory.new_rows()
        items = zip(rows.tolist(), trees.shapes, lengths.tolist(), strict=True)
        paths = [new_rows.add(row, shape.parents, length - 1) for row, shape, length in items]
        children = [_children(shape.parents) for shape in trees.shapes]
        parents = [Parent(i, -1) for i in range(len(rows))]
        for depth in range(1, max(shape.depth for shape in trees.shapes) + 1):
            read, read_from = list[Parent](), list[int]()
            ranking = self._ranked(depth, parents, trees, states, rows, lengths)
            for at, (parent, ranked) in enumerate(ranking):
                nodes = children[parent.tree][parent.node]
                trees.add(parent.tree, ranked, nodes)
                for node in nodes:
                    if trees.token_ids[parent.tree][node] != MISSING and children[parent.tree].get(node):
                        read.append(Parent(parent.tree, node))
                        read_from.append(at)
            if not read:
                return
            states = self._read(depth, read, paths, trees, lengths, states[read_from])
            parents = read

    def _ranked(
        self,
        depth: int,
        parents: list[Parent],
        trees: Trees,
        states: Tensor,
        rows: np.ndarray,
        lengths: np.ndarray,
    ) -> list[tuple[Parent, list[int]]]:
        """Candidate tokens after each parent, in order of the rank; empty if sampling failed.

        Args:
            states: hidden states of the head that drafts this depth, ``[parents, hidden]`` or ``[trees, hidden]``.
        """
        indices = [parent.tree for parent in parents]
        if len(states) != len(indices):  # ``states`` are those of all trees, but some trees do not have this depth
            states = states[indices]
        count = max(node[-1] + 1 for i in indices for node in trees.shapes[i].nodes if len(node) == depth)
        sampled, likeliest = self._heads.sample_and_rank(
            depth - 1, states, rows[indices], lengths[indices] + depth - 1, count
        )
        result: list[tuple[Parent, list[int]]] = []
        for parent, first, others in zip(parents, sampled, likeliest, strict=True):
            if first.failure:
                if first.failure.code is Code.INTERNAL:
                    trees.failed.add(parent.tree)
                result.append((parent, []))
            else:
                (token,) = first.token_ids
                result.append((parent, [token, *(other for other in others if other != token)]))
        return result

    def _read(
        self,
        depth: int,
        nodes: list[Parent],
        paths: list[TreePaths],
        trees: Trees,
        lengths: np.ndarray,
        states: Tensor,
    ) -> Tensor:
        """Compute nodes of this depth with the head of the next depth. Returns the states of that head, ``[nodes,
        hidden]``.

        Args:
            states: states of the head that drafted the nodes, ``[nodes, hidden]``.
        """
        for i in {node.tree for node in nodes}:
            paths[i].write(trees.token_ids[i], int(lengths[i]))
        if depth <= self._heads.count:  # the head of this depth reads nodes for the first time
            self._heads.copy_slots(depth, joined([each.prefix_copies() for each in paths]))
        rows = np.array([paths[tree].row(node) for tree, node in nodes])
        starts = np.array([paths[tree].position(node) for tree, node in nodes])
        states = self._heads.forward(depth, rows, starts, np.ones_like(starts), states)
        self._heads.copy_slots(depth, joined([each.node_copies(depth) for each in paths]))
        return states


def _children(parents: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found
