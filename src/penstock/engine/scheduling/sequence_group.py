"""The sequences of one request: forked from the first, and reordered by a beam search."""

from __future__ import annotations

from ..guided import Guide
from ..kv.cache_manager import KVCacheManager
from ..sequence.beam_search import BeamSearch, BeamStep
from ..sequence.sequence import Sequence, State


class SequenceGroup:
    """The sequences of one request, by index.

    The first sequence computes the prompt. The others are forked from it in the step that samples its first token. The
    sequences of a resumed request exist from the beginning.

    Args:
        sequences: the first sequence, or all of a resumed request. With ``use_beam_search``, sets its
            ``num_candidates``.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        first = sequences[0]
        self.request = first.request
        self.sequences = sequences
        self.search: BeamSearch | None = None
        """The beam search over the sequences; None without beam search."""
        self.preempted: set[int] = set()
        """Indices of sequences that were preempted at least once."""
        self.preempted_at: list[float] = []
        """Times of preemptions, seconds on the monotonic clock; only for traced requests."""
        self._first_guide: Guide | None = None
        """Copy of the first sequence's guide at the end of the prompt, to restart a guided beam search."""
        if self.request.sampling.use_beam_search:
            self.search = BeamSearch(first)
            first.num_candidates = self.search.num_candidates

    @property
    def first(self) -> Sequence:
        return self.sequences[0]

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state is not State.FINISHED]

    def fork(self, kv: KVCacheManager) -> list[Sequence]:
        """Fork the remaining sequences from the first. They share its blocks. Returns the new sequences, which are not
        running yet; empty if all sequences exist."""
        first, siblings = self.first, list[Sequence]()
        if not first.num_unforked:
            return siblings
        if self.search and first.guide:
            self._first_guide = first.guide.copy()
        for index in range(1, 1 + first.num_unforked):
            sibling = kv.fork(first, index)
            sibling.num_candidates = first.num_candidates
            siblings.append(sibling)
        self.sequences += siblings
        return siblings

    def reorder_beams(self, beam_steps: list[BeamStep], kv: KVCacheManager) -> list[int]:
        """Replace each beam ``i`` by the parent in ``beam_steps[i]`` followed by the token. Returns the workers' update
        (``RowUpdates.beam_steps``)."""
        rows = [beam.row for beam in self.sequences]
        kv.reorder_beams(self.sequences, [step.parent for step in beam_steps], [step.token for step in beam_steps])
        updates: list[int] = []
        for beam, step in zip(self.sequences, beam_steps, strict=True):
            beam.guide = step.guide
            updates += (beam.row, rows[step.parent], len(beam.tokens) - 1, step.token)
        return updates

    def restart_search(self, block_size: int) -> None:
        """Restart a preempted beam search from the prompt, with only the first sequence. The caller has ended the other
        beams.

        If beams were swapped or recomputed one by one, they would no longer share blocks, and might not all fit into
        the KV cache.
        """
        first = self.first
        if len(self.sequences) > 1:
            first.num_unforked = len(self.sequences) - 1
            first.guide = self._first_guide
        del self.sequences[1:], first.tokens[first.prompt_length :]
        del first.block_hashes[first.prompt_length // block_size :]
        self.search = BeamSearch(first)
