"""Takes snapshots of the engine, and records its steps as long as snapshots are requested."""

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
"""Maximum number of recorded steps."""
WATCH_TIME = 10.0
"""Seconds after a snapshot during which steps are recorded."""
MAX_SEQUENCES = 512
"""Maximum number of sequences in a snapshot. Running sequences come first."""
MAX_BLOCKS = 16_384
"""Maximum number of KV blocks listed in a snapshot, for all sequences together."""
MAX_CELLS = 4096
"""Maximum number of cells in the map of KV blocks."""
MAX_MAPPED = 2**18
"""Number of KV blocks above which snapshots have no map, as making it takes about 100 ns per block."""
ID_LENGTH = 8
"""Number of last characters of a request id in a snapshot: enough to find it in the log, too few to cancel it."""


class StepRecorder:
    """Takes snapshots, and records steps for ``WATCH_TIME`` after each snapshot. Does not slow steps down later."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: deque[tuple[float, float, list[StepPart]]] = deque(maxlen=MAX_STEPS)
        self._watched = float("-inf")

    def snapshot(self) -> Snapshot:
        """Current state of the engine, and the recorded steps."""
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
    for sequence in sequences:
        state = "running" if sequence.state is State.RUNNING else "preempted" if sequence.has_started else "waiting"
        blocks = sequence.blocks[:room]
        room -= len(blocks)
        yield SequenceState(
            id=_id(sequence),
            state=state,
            prompt_tokens=sequence.prompt_length,
            cached_tokens=sequence.num_cached_tokens or 0,
            computed_tokens=sequence.num_computed,
            output_tokens=sequence.num_output_tokens,
            seconds=now - sequence.arrived,
            blocks=blocks,
        )


def _id(sequence: Sequence) -> str:
    request_id = sequence.request.log_id or sequence.request.request_id.rpartition(":")[2]
    return request_id[-ID_LENGTH:] + (f"/{sequence.index}" if sequence.index else "")
