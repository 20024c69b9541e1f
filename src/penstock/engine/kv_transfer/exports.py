"""The prefill engine's side of KV transfers: computes prompts of decode engines as requests without output, and exports
the keys and values to the transfer buffer during the computation."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from penstock.core import Code, EngineRequest, Failure, PenstockError, PoolingParams, SamplingParams, TokenDelta
from penstock.core.requests import trace_log_fields

from ..executor.base import Executor, WorkerLostError
from ..scheduling.scheduler import Scheduler
from ..sequence.plan import Plan
from ..sequence.sequence import Sequence, State
from ..step import ExportKV, ExportState, StepInput
from .buffer import SLOT_TOKENS
from .endpoint import Endpoint
from .messages import Start
from .sender import Cancelled, Exported

logger = logging.getLogger(__name__)

ID_PREFIX = b"kv-transfer".hex() + ":"
"""Prefix of the ids of this module's requests. Ids of client requests also have the form hex, colon, text."""


class _Export:
    """A prompt computed for a decode engine."""

    def __init__(self, start: Start, needs_state: bool) -> None:
        self.start = start
        self.request_id = ID_PREFIX + start.transfer.hex()
        self.deadline = time.monotonic() + start.timeout if start.timeout else None
        """Time at which the request times out, seconds on the monotonic clock."""
        self.needs_state = needs_state
        """True until the recurrent states after the prompt are being exported."""
        self.num_tokens = len(start.tokens)
        self.is_repeated = False
        """True if the prompt is computed again, for the recurrent states after it."""
        self.sequence: Sequence | None = None
        """The sequence that computes the prompt; None once all tokens are computed."""
        self.blocks: list[int] = []
        """Blocks of the finished sequence, with references until all tokens are exported."""
        self.num_exported = start.first_slot * SLOT_TOKENS
        """Number of leading tokens that are exported, being exported, or not needed."""
        self.open: Exported | None = None
        """Buffer slot of the last exported token if that slot is not full; else None."""
        self.num_cached = -1
        """Number of leading tokens found in the prefix cache; -1: not known yet."""
        self.snapshot = -1
        """Snapshot of the recurrent states after the prompt, until they are exported; -1: none."""

    @property
    def num_computed(self) -> int:
        """Number of leading tokens that have been computed."""
        if self.sequence is None:
            return self.num_tokens
        return self.sequence.num_computed if self.sequence.state is State.RUNNING else 0


class _Places(NamedTuple):
    """Buffer positions for tokens ``first`` to ``end`` (exclusive) of a transfer."""

    first: int
    end: int
    places: np.ndarray
    """Positions in the buffer (``ExportKV.places``), ``[end - first]`` int64."""
    full: list[Exported]
    """Slots completed by these tokens."""


class KVExports:
    """Computes and exports the prompts of transfers. Not thread-safe: use it in the engine's thread.

    Args:
        add: adds a request (``Engine.add``).
        adapter_version: returns the version of an adapter by name; raises ``PenstockError`` if it is not loaded.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        executor: Executor,
        scheduler: Scheduler,
        *,
        add: Callable[[EngineRequest], None],
        adapter_version: Callable[[str], str],
    ) -> None:
        self._endpoint = endpoint
        self._buffer = endpoint.buffer
        self._executor = executor
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._add = add
        self._adapter_version = adapter_version
        self.stopping = False
        """True if the engine is stopping: new transfers are refused."""
        self.suspended = False
        """True if the engine sleeps and has no KV cache: new transfers are refused."""
        self._exports: dict[str, _Export] = {}
        """Transfers not yet completely exported, by request id."""
        self._calls: deque[tuple[Future[Any], bytes, list[Exported]]] = deque()
        """Unfinished ``ExportKV`` calls, each with its transfer and the slots that it completes."""
        self._finishing: dict[bytes, int] = {}
        """Number of cached tokens of each transfer with only its last tokens still being exported."""
        self._num_steps = 0
        """Number of steps so far that export tokens."""
        self._steps: dict[int, tuple[int, list[bytes]]] = {}
        """For each exporting plan in flight, by ``id``: step number (``StepInput.export_step``) and transfers."""
        self._in_steps: dict[bytes, int] = {}
        """Number of steps in flight that export tokens of each transfer."""

    @property
    def busy(self) -> bool:
        """True if ``poll`` must be called again soon, even without an event."""
        return bool(self._calls or self._finishing) or any(export.sequence is None for export in self._exports.values())

    def handle(self, event: Start | Cancelled) -> None:
        """Handle an event of the endpoint."""
        if isinstance(event, Cancelled):
            if export := self._exports.pop(ID_PREFIX + event.transfer.hex(), None):
                self._scheduler.abort(export.request_id)
                self._drop(export)
            return
        export = _Export(event, self._buffer.state_slots > 0)
        values = event.request_id, event.transfer.hex()[:8], export.num_tokens
        logger.info("request %s: transfer %s: %d tokens", *values, extra={"fields": trace_log_fields(event.trace)})
        try:
            if self.stopping:
                raise PenstockError(Code.UNAVAILABLE, "the prefill instance is stopping")
            if self.suspended:
                raise PenstockError(Code.UNAVAILABLE, "the prefill instance is asleep; wake it up first")
            if not 0 <= export.num_exported < export.num_tokens:
                message = f"the transfer has no tokens: slot {event.first_slot} of {export.num_tokens} tokens"
                raise PenstockError(Code.INVALID, message)
            if not self._buffer.has_tokens:
                export.num_exported = export.num_tokens
            self._compute(export)
        except PenstockError as error:
            self._endpoint.fail(event.transfer, error.failure)
            return
        self._exports[export.request_id] = export

    def _compute(self, export: _Export) -> None:
        """Add the request that computes the prompt. Raises ``PenstockError``."""
        start = export.start
        if start.adapter and self._adapter_version(start.adapter) != start.adapter_version:
            message = f"adapter {start.adapter!r} differs between the prefill and the decode instance"
            raise PenstockError(Code.UNAVAILABLE, f"{message}: load the same adapter in both")
        request = EngineRequest(
            request_id=export.request_id,
            prompt=start.tokens,
            sampling=SamplingParams(max_tokens=1),
            pooling=PoolingParams(),  # the request ends when its prompt is computed
            adapter=start.adapter,
            cache_salt=start.cache_salt,
            priority=start.priority,
            deadline=export.deadline,
            accepted=export.is_repeated,
            trace=start.trace,
        )
        self._add(request)
        export.sequence = self._scheduler.first_sequence(export.request_id)
        export.sequence.exports_state = export.needs_state

    def before_release(self, sequence: Sequence) -> None:
        """Keep the blocks of an ended sequence until all its tokens are exported (``Scheduler.before_release``)."""
        export = self._exports.get(sequence.request.request_id)
        if export and export.sequence is sequence and sequence.num_computed == export.num_tokens:
            export.sequence = None
            if export.num_cached < 0:  # else the prompt was computed again, for its states
                export.num_cached = sequence.num_cached_tokens or 0
            export.snapshot = sequence.exported_snapshot
            if export.num_exported < export.num_tokens:
                export.blocks = list(sequence.blocks)
                self._scheduler.device_pool.incref(export.blocks)
            else:
                self._finish_if_exported(export)

    def take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Handle the deltas of this module's requests. Returns the deltas of all other requests."""
        transfers = [delta for delta in deltas if delta.request_id.startswith(ID_PREFIX)]
        if not transfers:
            return deltas
        for delta in transfers:
            if delta.failure and (export := self._exports.pop(delta.request_id, None)):
                self._drop(export)
                self._endpoint.fail(export.start.transfer, delta.failure)
        return [delta for delta in deltas if not delta.request_id.startswith(ID_PREFIX)]

    def before_step(self, plan: Plan, step: StepInput) -> None:
        """Let a step export the tokens that it computes for transfers, layer by layer, while the buffer has free
        slots."""
        places: list[np.ndarray] | None = None
        exported: list[tuple[bytes, list[Exported]]] = []
        for i, item in enumerate(plan.scheduled):
            export = self._exports.get(item.sequence.request.request_id)
            end = item.start + item.length
            if export is None or export.num_exported >= end:
                continue
            # Export tokens from the prefix cache, and tokens for which no slot was free before. If this step fills
            # blocks by a swap-in or a load, ``poll`` exports these tokens after the step.
            if export.num_exported < item.start and not plan.swap_in and not plan.loads:
                self._export(export, item.start, item.sequence.blocks)
            if not item.start <= export.num_exported < end:
                continue
            found = self._allocate(export, end)
            if not found.full and not len(found.places):
                continue
            if places is None:
                places = [np.full(each.length, -1, np.int64) for each in plan.scheduled]
            places[i][found.first - item.start : found.end - item.start] = found.places
            exported.append((export.start.transfer, found.full))
            self._in_steps[export.start.transfer] = self._in_steps.get(export.start.transfer, 0) + 1
            self._finish_if_exported(export)
        if places is not None:
            self._num_steps += 1
            step.export_step, step.export_places = self._num_steps, np.concatenate(places)
            self._steps[id(plan)] = self._num_steps, [transfer for transfer, _ in exported]
            self._endpoint.step_submitted(self._num_steps, exported)

    def after_step(self, plan: Plan, failed: bool = False) -> None:
        """Report the end of a step, computed or failed, to the endpoint."""
        number, transfers = self._steps.pop(id(plan), (0, []))
        if number:
            self._endpoint.step_done(number, failed)
        for transfer in transfers:
            self._in_steps[transfer] -= 1
            if not self._in_steps[transfer]:
                del self._in_steps[transfer]

    def poll(self) -> None:
        """Export computed tokens that steps have not exported, while the buffer has free slots. Raises
        ``WorkerLostError``."""
        for export in self._exports.values():
            if export.open and export.sequence and export.sequence.state is not State.RUNNING:
                # the sequence was preempted
                self._release_open_slot(export)
        for export in list(self._exports.values()):
            computed = export.num_computed
            if export.num_exported < computed:
                self._export(export, computed, export.blocks if export.sequence is None else export.sequence.blocks)
        for export in list(self._exports.values()):
            if export.sequence is None and export.needs_state and export.num_exported == export.num_tokens:
                if export.snapshot >= 0:
                    self._export_state(export)
                else:
                    self._compute_state(export)
        if self._calls:
            self._executor.poll()
        while self._calls and self._calls[0][0].done():
            done, transfer, exported = self._calls.popleft()
            if error := done.exception():
                if isinstance(error, WorkerLostError):
                    raise error
                logger.error("keys and values could not be exported", exc_info=error)
                for each in exported:
                    self._buffer.release(each.slot)
                message = "keys and values could not be exported; see the log of the prefill instance"
                self._endpoint.fail(transfer, Failure(Code.INTERNAL, message))
                continue
            self._endpoint.offer(transfer, exported, 0, self._buffer.num_layers)
        in_progress = {transfer for _, transfer, _ in self._calls} | self._in_steps.keys()
        for transfer in [transfer for transfer in self._finishing if transfer not in in_progress]:
            self._endpoint.finish(transfer, self._finishing.pop(transfer))

    def _export(self, export: _Export, end: int, blocks: list[int]) -> None:
        """Export tokens ``num_exported`` to ``end`` between two steps, while the buffer has free slots."""
        found = self._allocate(export, end)
        if not len(found.places):
            return
        slots = self._kv.slot_mapping(blocks, found.first, found.end)
        call = self._executor.call(ExportKV(0, self._buffer.num_layers, slots, found.places))
        self._calls.append((call, export.start.transfer, found.full))
        self._finish_if_exported(export)

    def _compute_state(self, export: _Export) -> None:
        """Compute a prompt again after which no snapshot of the recurrent states was free, once one is free. One prompt
        at a time, as others could take the snapshot."""
        is_late = export.deadline is not None and time.monotonic() > export.deadline
        is_first = not any(each.is_repeated and each.sequence for each in self._exports.values())
        if not is_late and not (is_first and self._kv.snapshots and self._kv.snapshots.can_take):
            return
        self._scheduler.device_pool.release(export.blocks)
        export.blocks, export.is_repeated = [], True
        try:
            if is_late:
                raise PenstockError(Code.TIMEOUT, "the request timed out while it waited for a snapshot")
            self._compute(export)
        except PenstockError as error:
            del self._exports[export.request_id]
            self._endpoint.fail(export.start.transfer, error.failure)

    def _export_state(self, export: _Export) -> None:
        """Export the recurrent states after the prompt, if enough slots of the buffer are free."""
        if self._buffer.num_free < self._buffer.state_slots:
            return
        first = self._buffer.token_slots(export.num_tokens)
        slots = [self._buffer.allocate() for _ in range(self._buffer.state_slots)]
        exported = [Exported(index, *slot) for index, slot in enumerate(filter(None, slots), first)]
        call = ExportState(export.snapshot, np.array([each.slot for each in exported], np.int32))
        self._calls.append((self._executor.call(call), export.start.transfer, exported))
        export.needs_state = False
        self._free_snapshot(export)  # a step that overwrites it follows the call
        self._finish_if_exported(export)

    def _free_snapshot(self, export: _Export) -> None:
        if export.snapshot >= 0 and self._kv.snapshots:
            self._kv.snapshots.free(export.snapshot)
        export.snapshot = -1

    def _allocate(self, export: _Export, end: int) -> _Places:
        """Allocate buffer positions for tokens ``num_exported`` to ``end``, while the buffer has free slots."""
        first = export.num_exported
        places: list[np.ndarray] = []
        full: list[Exported] = []
        while export.num_exported < end:
            index, offset = divmod(export.num_exported, SLOT_TOKENS)
            if export.open is None:
                if (allocated := self._buffer.allocate()) is None:
                    break
                export.open = Exported(index, *allocated)
            stop = min((index + 1) * SLOT_TOKENS, end)
            begin = export.open.slot * SLOT_TOKENS + offset
            places.append(np.arange(begin, begin + stop - export.num_exported))
            export.num_exported = stop
            if stop % SLOT_TOKENS == 0 or stop == export.num_tokens:
                full.append(export.open)
                export.open = None
        return _Places(first, export.num_exported, np.concatenate(places) if places else np.zeros(0, np.int64), full)

    def _finish_if_exported(self, export: _Export) -> None:
        """Release the blocks of a transfer, and finish it, if all its tokens are exported or being exported."""
        if export.num_exported == export.num_tokens and export.sequence is None and not export.needs_state:
            del self._exports[export.request_id]
            # The calls that export these blocks are queued before any step that may overwrite them.
            self._scheduler.device_pool.release(export.blocks)
            self._finishing[export.start.transfer] = export.num_cached

    def _drop(self, export: _Export) -> None:
        """Release the blocks and the partly filled slot of a transfer that ended before its tokens were exported."""
        self._scheduler.device_pool.release(export.blocks)
        self._free_snapshot(export)
        if export.open:
            self._release_open_slot(export)

    def _release_open_slot(self, export: _Export) -> None:
        """Release the partly filled slot of a transfer; its tokens will be exported again.

        A preempted transfer must not keep the slot: it waits for blocks of other transfers, which may need this slot to
        finish. A step in flight may still write to the slot, but the next owner's data is written by a later step.
        """
        assert export.open
        export.num_exported = export.open.index * SLOT_TOKENS
        self._buffer.release(export.open.slot)
        export.open = None
