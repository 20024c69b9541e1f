"""Trees of draft tokens, which one step verifies together (Miao et al., 2024, SpecInfer; Cai et al., 2024, Medusa)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NUMBER_LISTS = re.compile(r"[(\[{]\s*\d+(?:\s*,\s*\d+)*\s*,?\s*[)\]}]")
"""A path in text: ``(0, 1)`` as vLLM has it, ``[0, 1]``, or ``{0, 1}`` as in TensorRT-LLM's ``config.pbtxt``."""
MAX_NODES = 256
MAX_DEPTH = 32


class TokenTree:
    """The shape of trees of draft tokens. A node is a path from the root, the sequence's newest token: each number is
    the rank of a token among the likeliest after the tokens before it.

    Nodes are listed in depth-first order, children by their rank.

    Args:
        paths: in any order; beginnings of paths are nodes, too.

    Raises ``ValueError`` where there are too many, or none.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        nodes = sorted({tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)})
        if not nodes or len(nodes) > MAX_NODES or max(map(len, nodes)) > MAX_DEPTH:
            raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, and a depth of at most {MAX_DEPTH}")
        self.nodes = nodes
        self.depth = max(map(len, nodes))
        index = {node: i for i, node in enumerate(nodes)}
        self.parents = [index.get(node[:-1], -1) for node in nodes]
        """Index of each node's parent; -1 for children of the root."""

    @classmethod
    def read(cls, text: str) -> TokenTree:
        """Parse paths such as ``[(0,), (0, 0), (1,)]``, ``[[0], [0, 0], [1]]`` or ``{0, 0}, {1}``.

        Raises ``ValueError`` for anything else.
        """
        if re.sub(r"[\s,]", "", NUMBER_LISTS.sub("", text)) not in ("", "[]", "()"):
            raise ValueError("it is no tree such as [(0,), (0, 0), (1,)]")
        return cls([int(number) for number in re.findall(r"\d+", path)] for path in NUMBER_LISTS.findall(text))

    def up_to(self, depth: int) -> TokenTree:
        """The tree's nodes of at most this depth, which is at least 1."""
        return self if depth >= self.depth else TokenTree([node for node in self.nodes if len(node) <= depth])

    def scratch_blocks(self, block_size: int) -> int:
        """KV blocks that hold what does not fit into a sequence's own, wherever in a block the tree begins."""
        return max(scratch_blocks(self.parents, length, block_size) for length in range(1, block_size + 1))


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree, in depth-first order; 1 for children of the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return found


def segments(parents: Sequence[int]) -> list[range]:
    """The nodes of a tree, in depth-first order, by the first path from the root to a leaf that has them."""
    starts = [i for i, parent in enumerate(parents) if parent != i - 1 or not i]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(parents)], strict=True)]


def scratch_blocks(parents: Sequence[int], length: int, block_size: int) -> int:
    """KV blocks for the keys and values of a tree's paths but for the first, which is in the sequence's own blocks.

    Args:
        length: tokens of the sequence, after which the tree begins. Draft heads keep a token one place before it.
    """
    found, count = depths(parents), 0
    for segment in segments(parents)[1:]:
        last = found[segment[-1]] - 1
        count += max((first + last) // block_size - first // block_size + 1 for first in (length - 1, length))
    return count
