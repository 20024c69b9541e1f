"""Records steps, and takes snapshots of the engine, while somebody looks at it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice

from ..engine import Engine
from ..sequence.plan import Plan
from ..sequence.sequence import Sequence, State
from .snapshot import SequenceState, Snapshot, Step, StepPart

MAX_STEPS = 240
"""Steps that are kept."""
WATCH_TIME = 10.0
"""Seconds after a snapshot in which steps are recorded."""
MAX_SEQUENCES = 512
"""Sequences of a snapshot: the running ones first."""
MAX_BLOCKS = 16_384
"""KV blocks in the lists of all sequences of a snapshot together."""
MAX_CELLS = 4096
"""Cells of the map of KV blocks."""
MAX_MAPPED = 2**18
"""KV blocks of which a map is made, in about 100 ns each."""
ID_LENGTH = 8
"""Last characters of request ids that are shown: enough to find a request in the log, not to cancel it."""


class StepRecorder:
    """Takes snapshots, and records steps while somebody takes them.

    A step costs nothing while nobody does.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: deque[tuple[float, float, list[StepPart]]] = deque(maxlen=MAX_STEPS)
        self._watched = float("-inf")

    def snapshot(self) -> Snapshot:
        """The engine's state now."""
        self._watched, self._engine.after_step = time.monotonic(), self._after_step
        now, scheduler = time.perf_counter(), self._engine.scheduler
        known = list(chain(scheduler.running, scheduler.waiting))
        pool = scheduler.device_pool
        per_cell = -(-pool.total // MAX_CELLS)
        states = pool.states if pool.total <= MAX_MAPPED else ""
        cells = "".join(max(states[i : i + per_cell]) for i in range(0, len(states), per_cell))
        return Snapshot(
            block_size=pool.block_size,
            cells=cells,
            blocks_per_cell=per_cell,
            sequences=list(_states(known[:MAX_SEQUENCES])),
            hidden=len(known[MAX_SEQUENCES:]),
            steps=[Step(now - begun, ended - begun, parts) for begun, ended, parts in self._steps],
        )

    def _after_step(self, plan: Plan, begun: float, ended: float) -> None:
        if time.monotonic() - self._watched > WATCH_TIME:
            self._steps.clear()
            self._engine.after_step = None
            return
        parts = [
            StepPart(_id(item.sequence), item.length + len(item.draft), item.start < item.sequence.prompt_length)
            for item in islice(plan.scheduled, MAX_SEQUENCES)
        ]
        self._steps.append((begun, ended, parts))


def _states(sequences: Iterable[Sequence]) -> Iterable[SequenceState]:
    now, room = time.monotonic(), MAX_BLOCKS
    for one in sequences:
        state = "running" if one.state is State.RUNNING else "preempted" if one.has_started else "waiting"
        blocks = one.blocks[:room]
        room -= len(blocks)
        yield SequenceState(
            id=_id(one),
            state=state,
            prompt_tokens=one.prompt_length,
            cached_tokens=one.num_cached_tokens or 0,
            computed_tokens=one.num_computed,
            output_tokens=one.num_output_tokens,
            seconds=now - one.arrived,
            blocks=blocks,
        )


def _id(sequence: Sequence) -> str:
    request_id = sequence.request.log_id or sequence.request.request_id.rpartition(":")[2]
    return request_id[-ID_LENGTH:] + (f"/{sequence.index}" if sequence.index else "")
