"""The draft tokens of a step: their rows, and their acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...step import SampledTokens, StepInput
from ..input_batch import InputBatch
from .tree_rows import SlotCopies, TreeMemory, TreePaths, joined


class StepDrafts:
    """The draft tokens that a step verifies. A chain is in the row of its sequence; a tree has a row for each path.

    Args:
        batch: the worker's rows.
        memory: rows and blocks for the paths of trees.
    """

    def __init__(self, batch: InputBatch, memory: TreeMemory) -> None:
        self._batch = batch
        self._memory = memory
        self.trees: dict[int, TreePaths] = {}
        """Row number → paths of the row's tree, for rows with trees."""

    def write(self, step: StepInput) -> None:
        """Write a step's draft tokens to the rows, replacing those of the previous step."""
        self.trees.clear()
        if not len(step.drafts):
            return
        at, rows = 0, self._memory.new_rows() if len(step.draft_parents) else None
        for i in np.flatnonzero(step.drafts).tolist():
            row, first, count = int(step.rows[i]), int(step.starts[i] + step.lengths[i]), int(step.drafts[i])
            tokens = step.draft_token_ids[at : at + count]
            parents = step.draft_parents[at : at + count].tolist()
            if rows and parents != list(range(-1, count - 1)):
                self.trees[row] = rows.add(row, parents, first)
                self.trees[row].write(tokens.tolist(), first)
            else:
                self._batch.tokens[row, first : first + count] = tokens
            at += count

    def depths(self, row: int, count: int) -> Sequence[int]:
        """Offset of each sampled position from the length of the row: 0 for the next token, then the depth of each of
        ``count`` draft tokens."""
        tree = self.trees.get(row)
        return (0, *tree.depths) if tree else range(count + 1)

    def accept(self, row: int, length: int, sampled: list[SampledTokens]) -> SampledTokens:
        """Accept the draft tokens of a row that equal the sampled tokens. Returns the accepted tokens, followed by the
        token sampled after them.

        Args:
            length: length of the row without draft tokens.
            sampled: result of each position, in the order of ``depths``.
        """
        count = len(sampled) - 1
        if tree := self.trees.get(row):
            result, tree.accepted = _verify(sampled, tree.token_ids, tree.parents)
            return result
        drafted = self._batch.tokens[row, length : length + count].tolist()
        return _verify(sampled, drafted, range(-1, count - 1))[0]

    def shared_copies(self) -> SlotCopies:
        """Copies that give each path of a tree the keys and values that it shares with other paths. Each layer makes
        them. Requires ``trees``."""
        return joined([c for tree in self.trees.values() for c in (tree.prefix_copies(), tree.node_copies())])

    def accepted_copies(self) -> SlotCopies:
        """Copies of the keys and values of accepted draft tokens, from the blocks of their paths to the blocks of the
        sequences. Requires ``trees``."""
        return joined([tree.accepted_copies() for tree in self.trees.values()])


def _verify(
    sampled: list[SampledTokens], draft: Sequence[int], parents: Sequence[int]
) -> tuple[SampledTokens, list[int]]:
    """Accept the draft tokens that equal the token sampled at their parent, beginning at the root.

    Args:
        sampled: result of the position after the row's last token, then of the position after each draft token.
        draft: the draft tokens.
        parents: index of the parent of each draft token; -1: the last token of the row.

    Returns:
        The accepted tokens, followed by the token sampled after them; and the indices of the accepted tokens.
    """
    first, *later = sampled
    if first.failure:
        return first, []
    path, children = list[int](), {pair: i for i, pair in enumerate(zip(parents, draft, strict=True))}
    token_ids, logprobs, logits = list(first.token_ids), list(first.logprobs or []), list(first.logits or [])
    while (node := children.get((path[-1] if path else -1, token_ids[-1]))) is not None:
        result = later[node]
        if result.failure:  # the next step samples at this position again, and reports the failure
            break
        path.append(node)
        token_ids += result.token_ids
        logprobs += result.logprobs or []
        logits += result.logits or []
    accepted = SampledTokens(
        token_ids, None if first.logprobs is None else logprobs, None if first.logits is None else logits
    )
    return accepted, path
