"""Preemption: running sequences give up their KV blocks, and continue later from a swapped copy or from the start."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.config.options import SchedulerOptions

from ..kv.block_pool import BlockPool
from ..kv.cache_manager import KVCacheManager
from ..sequence.plan import Plan
from ..sequence.sequence import Sequence, State
from .running import Running
from .sequence_group import SequenceGroup
from .step_builder import StepBuilder
from .waiting import Waiting


class Preemption:
    """Preempts running sequences, the last in scheduling order first, and counts them.

    With ``preemption_mode`` ``swap`` and room in the host tier, a sequence's blocks are copied there; otherwise it is
    recomputed. The beams of a request are preempted together, and their search starts again.

    Args:
        groups: the unfinished requests' sequences, by request id.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        device: BlockPool,
        kv: KVCacheManager,
        running: Running,
        waiting: Waiting,
        groups: Mapping[str, SequenceGroup],
        builder: StepBuilder,
    ) -> None:
        self.count = 0
        """Preemptions since the engine started; those of a request's beams count once."""
        self.num_sequences = 0
        """Sequences that were preempted at least once since the engine started."""
        self._swaps = options.preemption_mode == "swap"
        self._device = device
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._groups = groups
        self._builder = builder

    def make_room(self, sequence: Sequence, count: int, plan: Plan) -> int | None:
        """Preempt others, and at last the sequence itself, until there are free blocks for ``count`` more tokens of a
        running sequence.

        Returns how many blocks these take; None where the sequence cannot be part of this step: it was preempted, or
        the next to be preempted is in a step in flight.
        """
        while (missing := self._kv.missing(sequence, count)) > self._device.free:
            victim = self._running.last
            if any(one.inflight_steps for one in self._preempted_with(victim)):
                return None
            self._preempt(victim, plan)
            if sequence.state is not State.RUNNING:
                return None
        return missing

    def confirm_swaps(self, plan: Plan) -> None:
        """To be called when ``plan`` was computed: the sequences that it swapped out may be swapped in again."""
        for sequence in plan.swapped:
            sequence.swapping_out = False

    def cancel_swaps(self, plan: Plan) -> None:
        """To be called when ``plan`` has failed: the sequences that it swapped out will be recomputed."""
        self.confirm_swaps(plan)
        for sequence in plan.swapped:
            if sequence.state is State.SWAPPED:
                self._waiting.leave(sequence)
                self._kv.release_host(sequence)
                sequence.forget_computed()
                self._waiting.push(sequence)

    def _preempted_with(self, sequence: Sequence) -> list[Sequence]:
        return self._groups[sequence.request.request_id].sequences if sequence.num_candidates else [sequence]

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        group = self._groups[victim.request.request_id]
        victims = self._preempted_with(victim)
        self.count += 1
        self.num_sequences -= len(group.preempted)
        group.preempted.update(one.index for one in victims)
        self.num_sequences += len(group.preempted)
        for one in victims:
            self._running.remove(one)
        if group.search:
            victim, *others = victims
            for other in others:
                other.state = State.FINISHED
                self._running.release(other)
            group.restart_search(self._device.block_size)
            self._builder.drop_branches(group.request.request_id)
        elif self._swaps and (moved := self._kv.swap_out(victim)):
            plan.swap_out += moved
            plan.swapped.append(victim)
            victim.state, victim.swapping_out = State.SWAPPED, True
        if victim.state is not State.SWAPPED:
            victim.forget_computed()
        self._running.release(victim)
        self._waiting.push(victim)
