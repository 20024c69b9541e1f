"""Trees of draft tokens, verified together in one step (Miao et al., 2024, SpecInfer; Cai et al., 2024, Medusa)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NUMBER_LISTS = re.compile(r"[(\[{]\s*\d+(?:\s*,\s*\d+)*\s*,?\s*[)\]}]")
"""A path: ``(0, 1)`` as in vLLM, ``[0, 1]``, or ``{0, 1}`` as in TensorRT-LLM's ``config.pbtxt``."""
MAX_NODES = 256
MAX_DEPTH = 32


class TokenTree:
    """Shape of a tree of draft tokens.

    The root is the sequence's last token. A node is a path from the root: each number is the rank (from 0) of a token
    among the most likely ones after the previous tokens. Nodes are in depth-first order, children by rank.

    Args:
        paths: paths in any order; their prefixes are nodes, too.

    Raises ``ValueError`` for an empty or too large tree.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        nodes = sorted({tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)})
        self.depth = max(map(len, nodes), default=0)
        if not nodes or len(nodes) > MAX_NODES or self.depth > MAX_DEPTH:
            found = f"the tree has {len(nodes)} nodes and depth {self.depth}"
            raise ValueError(f"{found}; it must have 1 to {MAX_NODES} nodes, and at most depth {MAX_DEPTH}")
        self.nodes = nodes
        index = {node: i for i, node in enumerate(nodes)}
        self.parents = [index.get(node[:-1], -1) for node in nodes]
        """Index of each node's parent; -1 for children of the root."""

    @classmethod
    def read(cls, text: str) -> TokenTree:
        """Parse paths such as ``[(0,), (0, 0), (1,)]``, ``[[0], [0, 0], [1]]`` or ``{0, 0}, {1}``.

        Raises ``ValueError`` for any other text.
        """
        if re.sub(r"[\s,]", "", NUMBER_LISTS.sub("", text)) not in ("", "[]", "()"):
            raise ValueError("it is not a tree such as [(0,), (0, 0), (1,)]")
        return cls([int(number) for number in re.findall(r"\d+", path)] for path in NUMBER_LISTS.findall(text))

    def up_to(self, depth: int) -> TokenTree:
        """Return the tree of the nodes up to ``depth``, which must be at least 1."""
        return self if depth >= self.depth else TokenTree([node for node in self.nodes if len(node) <= depth])

    def scratch_blocks(self, block_size: int) -> int:
        """Maximum number of additional KV blocks (``scratch_blocks``), over all positions of the tree in a block."""
        return max(scratch_blocks(self.parents, length, block_size) for length in range(1, block_size + 1))


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree, in depth-first order; 1 for children of the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return found


def segments(parents: Sequence[int]) -> list[range]:
    """Split the nodes of a tree, in depth-first order, by the first root-to-leaf path that contains them."""
    starts = [i for i, parent in enumerate(parents) if parent != i - 1 or not i]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(parents)], strict=True)]


def scratch_blocks(parents: Sequence[int], length: int, block_size: int) -> int:
    """Number of additional KV blocks for a tree's paths except the first, which uses the sequence's blocks.

    Args:
        length: number of tokens of the sequence, after which the tree begins. Draft heads store a token's keys and
            values one position earlier.
    """
    found, count = depths(parents), 0
    for segment in segments(parents)[1:]:
        last = found[segment[-1]] - 1
        count += max((first + last) // block_size - first // block_size + 1 for first in (length - 1, length))
    return count
