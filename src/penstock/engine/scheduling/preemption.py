"""Preemption: running sequences release their KV blocks, and are later swapped in or recomputed."""

from __future__ import annotations

import time

from ..sequence.plan import Plan
from ..sequence.sequence import Sequence, State
from .state import SchedulerState


class Preemption:
    """Preempts running sequences, the last in scheduling order first, and counts them.

    With ``preemption_mode`` ``swap`` and enough swap space, a sequence's blocks and recurrent state are swapped out;
    otherwise the sequence is recomputed. The beams of a request are preempted together, and their search is restarted.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.count = 0
        """Number of preemptions since the engine started; the beams of a request count once."""
        self.num_sequences = 0
        """Number of sequences that were preempted at least once since the engine started."""
        self._swap_space = state.swap_space if state.options.preemption_mode == "swap" else None
        self._device_pool, self._kv, self._builder = state.device_pool, state.kv, state.builder
        self._running, self._waiting, self._groups = state.running, state.waiting, state.groups

    def make_room(self, sequence: Sequence, count: int, plan: Plan) -> int | None:
        """Free blocks for ``count`` more tokens of ``sequence``: release imported prefixes of waiting sequences, then
        preempt other sequences, finally ``sequence`` itself.

        Returns the number of blocks to allocate. None if the sequence cannot be part of this step: it was preempted,
        or a step in flight computes the next sequence to preempt.
        """
        while (num_blocks := self._kv.num_blocks_to_allocate(sequence, count)) > self._device_pool.num_free:
            if self._kv.drop_import():
                continue
            victim = self._running.last
            if any(one.inflight_steps for one in self._preempted_with(victim)):
                return None
            self._preempt(victim, plan)
            if sequence.state is not State.RUNNING:
                return None
        return num_blocks

    def recompute_all(self) -> None:
        """Preempt all running sequences, discard the host blocks of swapped sequences, and drop imported prefixes, so
        that all KV is recomputed. Call this while no step is in flight."""
        while len(self._running):
            self._preempt(self._running.last)
        for sequence in [one for one in self._waiting if one.state is State.SWAPPED]:
            self._recompute_swapped(sequence)
        while self._kv.drop_import():
            pass

    def confirm_swaps(self, plan: Plan) -> None:
        """Allow the sequences that ``plan`` swapped out to be swapped in again. Call this when its step is computed."""
        for sequence in plan.swapped:
            sequence.swapping_out = False

    def cancel_swaps(self, plan: Plan) -> None:
        """Recompute the sequences that ``plan`` swapped out. Call this when its step has failed."""
        self.confirm_swaps(plan)
        for sequence in plan.swapped:
            if sequence.state is State.SWAPPED:
                self._recompute_swapped(sequence)

    def _recompute_swapped(self, sequence: Sequence) -> None:
        """Free the swap space of a sequence, and queue it to be recomputed."""
        self._waiting.remove(sequence)
        assert self._swap_space
        self._swap_space.release(sequence)
        sequence.reset_computed()
        self._waiting.push(sequence)

    def _preempted_with(self, sequence: Sequence) -> list[Sequence]:
        """The sequences to preempt together with ``sequence``, including it: all beams of its request."""
        return self._groups[sequence.request.request_id].sequences if sequence.num_candidates else [sequence]

    def _preempt(self, victim: Sequence, plan: Plan | None = None) -> None:
        """Preempt a sequence, or all beams of its request.

        Args:
            plan: plan that gets the blocks to swap out; None recomputes the sequence instead.
        """
        group = self._groups[victim.request.request_id]
        victims = self._preempted_with(victim)
        self.count += 1
        self.num_sequences -= len(group.preempted)
        group.preempted.update(one.index for one in victims)
        self.num_sequences += len(group.preempted)
        if group.request.is_sampled:
            group.preempted_at.append(time.monotonic())
        for one in victims:
            self._running.remove(one)
        if group.search:
            victim, *others = victims
            for other in others:
                other.state = State.FINISHED
                self._running.free(other)
            group.restart_search(self._device_pool.block_size)
            self._builder.drop_beam_steps(group.request.request_id)
        elif plan is not None and self._swap_space and (copies := self._swap_space.swap_out(victim)):
            plan.swap_out += copies.blocks
            plan.state_swap_out += copies.states
            plan.swapped.append(victim)
            victim.state, victim.swapping_out = State.SWAPPED, True
        if victim.state is not State.SWAPPED:
            victim.reset_computed()
        self._running.free(victim)
        self._waiting.push(victim)
