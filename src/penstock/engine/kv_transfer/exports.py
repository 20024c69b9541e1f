"""A prefill engine's part of KV transfers: prompts of decode engines are computed as requests without output, and their
keys and values are exported to the transfer buffer as they are computed."""

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
from ..step import ExportKV, StepInput
from .buffer import SLOT_TOKENS
from .endpoint import Endpoint
from .messages import Start
from .sender import Cancelled, Exported

logger = logging.getLogger(__name__)

ID_PREFIX = b"kv-transfer".hex() + ":"
"""Begins the ids of requests of this module, as a client's do in the engine process."""


class _Export:
    """A prompt that is computed for a decode engine."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.request_id = ID_PREFIX + start.transfer.hex()
        self.num_tokens = len(start.tokens)
        self.sequence: Sequence | None = None
        """Its sequence, until that has computed all tokens."""
        self.blocks: list[int] = []
        """Its blocks, referenced, once the sequence has ended so and not all of them are exported."""
        self.num_exported = start.first_slot * SLOT_TOKENS
        """Leading tokens whose export was sent to the workers, or that are not needed."""
        self.open: Exported | None = None
        """The slot that holds the last of these tokens where it is not full."""
        self.num_cached = 0
        """Leading tokens that were in the prefix cache."""

    @property
    def num_computed(self) -> int:
        """Leading tokens that have been computed."""
        if self.sequence is None:
            return self.num_tokens
        return self.sequence.num_computed if self.sequence.state is State.RUNNING else 0


class _Places(NamedTuple):
    """Where tokens ``first`` to ``end`` of a transfer are exported."""

    first: int
    end: int
    places: np.ndarray
    """``[end - first]`` int64."""
    full: list[Exported]
    """Slots that are complete with these tokens."""


class KVExports:
    """Use it in the thread that runs the steps.

    Args:
        add: ``Engine.add``.
        adapter_version: version of a loaded adapter; raises ``PenstockError``.
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
        """Whether new transfers are refused, as the engine stops."""
        self.suspended = False
        """Whether they are refused, as there is no KV cache."""
        self._exports: dict[str, _Export] = {}
        """By request id."""
        self._calls: deque[tuple[Future[Any], bytes, list[Exported]]] = deque()
        self._finishing: dict[bytes, int] = {}
        """Transfers of which everything is being exported → number of tokens that were cached."""
        self._num_steps = 0
        """Number of steps that have exported something."""
        self._steps: dict[int, tuple[int, list[bytes]]] = {}
        """Plan in flight (``id``) → number of its step, and the transfers that it exports."""
        self._in_steps: dict[bytes, int] = {}
        """Transfer → number of steps in flight that export it."""

    @property
    def busy(self) -> bool:
        """Whether ``poll`` has to be called again soon, though no event comes."""
        return bool(self._calls or self._finishing) or any(one.sequence is None for one in self._exports.values())

    def handle(self, event: Start | Cancelled) -> None:
        """Handle an event of the endpoint."""
        if isinstance(event, Cancelled):
            if one := self._exports.pop(ID_PREFIX + event.transfer.hex(), None):
                self._scheduler.abort(one.request_id)
                self._drop(one)
            return
        one = _Export(event)
        words = "request %s: transfer %s: %d tokens"
        facts = trace_log_fields(event.trace)
        logger.info(words, event.request_id, event.transfer.hex()[:8], one.num_tokens, extra={"fields": facts})
        try:
            if self.stopping:
                raise PenstockError(Code.UNAVAILABLE, "the prefill instance is stopping")
            if self.suspended:
                raise PenstockError(Code.UNAVAILABLE, "the prefill instance sleeps")
            if event.adapter and self._adapter_version(event.adapter) != event.adapter_version:
                words = f"adapter {event.adapter!r} has other contents here than on the decode instance"
                raise PenstockError(Code.UNAVAILABLE, words)
            if not 0 <= one.num_exported < one.num_tokens:
                raise PenstockError(Code.INVALID, "a transfer without tokens")
            request = EngineRequest(
                request_id=one.request_id,
                prompt=event.tokens,
                sampling=SamplingParams(max_tokens=1),
                pooling=PoolingParams(),  # ends when the prompt is computed
                adapter=event.adapter,
                cache_salt=event.cache_salt,
                priority=event.priority,
                deadline=time.monotonic() + event.timeout if event.timeout else None,
                trace=event.trace,
            )
            self._add(request)
        except PenstockError as error:
            self._endpoint.fail(event.transfer, error.failure)
            return
        one.sequence = self._scheduler.first_sequence(one.request_id)
        self._exports[one.request_id] = one

    def before_release(self, sequence: Sequence) -> None:
        """A sequence has ended, and its blocks are about to be released: keep those that are not exported yet."""
        one = self._exports.get(sequence.request.request_id)
        if one and one.sequence is sequence and sequence.num_computed == one.num_tokens:
            one.sequence, one.num_cached = None, sequence.num_cached_tokens or 0
            if one.num_exported < one.num_tokens:
                one.blocks = list(sequence.blocks)
                self._scheduler.device_pool.incref(one.blocks)
            else:
                self._finish_if_exported(one)

    def take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Handle the deltas of this module's requests; returns the others."""
        own = [delta for delta in deltas if delta.request_id.startswith(ID_PREFIX)]
        if not own:
            return deltas
        for delta in own:
            if delta.failure and (one := self._exports.pop(delta.request_id, None)):
                self._drop(one)
                self._endpoint.fail(one.start.transfer, delta.failure)
        return [delta for delta in deltas if not delta.request_id.startswith(ID_PREFIX)]

    def before_step(self, plan: Plan, step: StepInput) -> None:
        """Have a step export the tokens that it computes for transfers, layer by layer, as far as there is room in the
        buffer."""
        places: list[np.ndarray] | None = None
        exported: list[tuple[bytes, list[Exported]]] = []
        for i, item in enumerate(plan.scheduled):
            one = self._exports.get(item.sequence.request.request_id)
            end = item.start + item.length
            if one is None or one.num_exported >= end:
                continue
            # From the prefix cache, or left out by earlier steps. A step that swaps in or loads fills blocks itself:
            # ``poll``.
            if one.num_exported < item.start and not plan.swap_in and not plan.loads:
                self._export(one, item.start, item.sequence.blocks)
            if not item.start <= one.num_exported < end:
                continue
            found = self._allocate(one, end)
            if not found.full and not len(found.places):
                continue
            if places is None:
                places = [np.full(each.length, -1, np.int64) for each in plan.scheduled]
            places[i][found.first - item.start : found.end - item.start] = found.places
            exported.append((one.start.transfer, found.full))
            self._in_steps[one.start.transfer] = self._in_steps.get(one.start.transfer, 0) + 1
            self._finish_if_exported(one)
        if places is not None:
            self._num_steps += 1
            step.export_step, step.export_places = self._num_steps, np.concatenate(places)
            self._steps[id(plan)] = self._num_steps, [transfer for transfer, _ in exported]
            self._endpoint.step_submitted(self._num_steps, exported)

    def after_step(self, plan: Plan, failed: bool = False) -> None:
        """A step was computed, or has failed."""
        number, transfers = self._steps.pop(id(plan), (0, []))
        if number:
            self._endpoint.step_done(number, failed)
        for transfer in transfers:
            self._in_steps[transfer] -= 1
            if not self._in_steps[transfer]:
                del self._in_steps[transfer]

    def poll(self) -> None:
        """Export what steps have not exported, as far as there is room in the buffer. Raises ``WorkerLostError``."""
        for one in self._exports.values():
            if one.open and one.sequence and one.sequence.state is not State.RUNNING:  # preempted
                self._release_open_slot(one)
        for one in list(self._exports.values()):
            computed = one.num_computed
            if one.num_exported < computed:
                self._export(one, computed, one.blocks if one.sequence is None else one.sequence.blocks)
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
                self._endpoint.fail(transfer, Failure(Code.INTERNAL, "keys and values could not be exported"))
                continue
            self._endpoint.offer(transfer, exported, 0, self._buffer.num_layers)
        in_progress = {transfer for _, transfer, _ in self._calls} | self._in_steps.keys()
        for transfer in [transfer for transfer in self._finishing if transfer not in in_progress]:
            self._endpoint.finish(transfer, self._finishing.pop(transfer))

    def _export(self, one: _Export, end: int, blocks: list[int]) -> None:
        """Export tokens from ``num_exported`` to ``end`` between two steps, as far as there is room in the buffer."""
        found = self._allocate(one, end)
        if not len(found.places):
            return
        slots = self._kv.slot_mapping(blocks, found.first, found.end)
        call = self._executor.call(ExportKV(0, self._buffer.num_layers, slots, found.places))
        self._calls.append((call, one.start.transfer, found.full))
        self._finish_if_exported(one)

    def _allocate(self, one: _Export, end: int) -> _Places:
        """Places in the buffer for tokens from ``num_exported`` to ``end``, as far as there is room."""
        first = one.num_exported
        places: list[np.ndarray] = []
        full: list[Exported] = []
        while one.num_exported < end:
            index, offset = divmod(one.num_exported, SLOT_TOKENS)
            if one.open is None:
                if (allocated := self._buffer.allocate()) is None:
                    break
                one.open = Exported(index, *allocated)
            stop = min((index + 1) * SLOT_TOKENS, end)
            begin = one.open.slot * SLOT_TOKENS + offset
            places.append(np.arange(begin, begin + stop - one.num_exported))
            one.num_exported = stop
            if stop % SLOT_TOKENS == 0 or stop == one.num_tokens:
                full.append(one.open)
                one.open = None
        return _Places(first, one.num_exported, np.concatenate(places) if places else np.zeros(0, np.int64), full)

    def _finish_if_exported(self, one: _Export) -> None:
        if one.num_exported == one.num_tokens and one.sequence is None:
            del self._exports[one.request_id]
            self._scheduler.device_pool.release(one.blocks)  # the workers export them before they compute anything else
            self._finishing[one.start.transfer] = one.num_cached

    def _drop(self, one: _Export) -> None:
        """Forget a transfer that has ended before all of it was exported."""
        self._scheduler.device_pool.release(one.blocks)
        if one.open:
            self._release_open_slot(one)

    def _release_open_slot(self, one: _Export) -> None:
        """Release the slot that is not full; its tokens have to be exported again. A preempted transfer would keep it
        from those whose blocks it waits for. A step in flight may still write to it; whoever gets it is written to by
        a later one."""
        assert one.open
        one.num_exported = one.open.index * SLOT_TOKENS
        self._buffer.release(one.open.slot)
        one.open = None
