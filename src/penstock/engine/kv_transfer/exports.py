"""A prefill engine's part of KV transfers: prompts of decode engines are computed as requests without output, and their
keys and values are exported to the transfer buffer as they are computed."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from penstock.core import Code, EngineRequest, Failure, PenstockError, PoolingParams, SamplingParams, TokenDelta

from ..executor.base import Executor, WorkerLostError
from ..kv.cache_manager import KVCacheManager
from ..sequence.sequence import Sequence, State
from ..step import ExportKV
from .buffer import SLOT_TOKENS, TransferBuffer
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
        """Its sequence, while that has not ended."""
        self.blocks: list[int] = []
        """Its blocks, referenced, once the sequence has ended and not all of them are exported."""
        self.num_exported = start.first_slot * SLOT_TOKENS
        """Leading tokens that were exported, or are not needed."""
        self.num_cached = 0
        """Leading tokens that were in the prefix cache."""

    @property
    def num_computed(self) -> int:
        """Leading tokens that have been computed."""
        if self.sequence is None:
            return self.num_tokens
        return self.sequence.num_computed if self.sequence.state is State.RUNNING else 0


class KVExports:
    """Use it in the thread that runs the steps.

    Args:
        add: ``Engine.add``.
        abort: ``Engine.abort``.
        sequence_of: the first sequence of a request.
        adapter_version: version of a loaded adapter; raises ``PenstockError``.
        num_layers: of the model.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        buffer: TransferBuffer,
        executor: Executor,
        kv: KVCacheManager,
        *,
        add: Callable[[EngineRequest], None],
        abort: Callable[[str], Any],
        sequence_of: Callable[[str], Sequence],
        adapter_version: Callable[[str], str],
        num_layers: int,
    ) -> None:
        self._endpoint = endpoint
        self._buffer = buffer
        self._executor = executor
        self._kv = kv
        self._add = add
        self._abort = abort
        self._sequence_of = sequence_of
        self._adapter_version = adapter_version
        self._num_layers = num_layers
        self.stopping = False
        """Whether new transfers are refused."""
        self._exports: dict[str, _Export] = {}
        """By request id."""
        self._calls: deque[tuple[Future[Any], bytes, list[Exported]]] = deque()
        self._finishing: deque[tuple[bytes, int]] = deque()
        """Transfers of which everything is being exported, with the number of tokens that were cached."""

    @property
    def busy(self) -> bool:
        """Whether ``poll`` has to be called again soon, though no event comes."""
        return bool(self._calls) or any(one.sequence is None for one in self._exports.values())

    def handle(self, event: Start | Cancelled) -> None:
        """Handle an event of the endpoint."""
        if isinstance(event, Cancelled):
            if one := self._exports.pop(ID_PREFIX + event.transfer.hex(), None):
                self._abort(one.request_id)
                self._kv.release_blocks(one.blocks)
            return
        one = _Export(event)
        logger.info("transfer %s: %d tokens, request %s", event.transfer.hex()[:8], one.num_tokens, event.request_id)
        try:
            if self.stopping:
                raise PenstockError(Code.UNAVAILABLE, "the prefill instance is stopping")
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
            )
            self._add(request)
        except PenstockError as error:
            self._endpoint.fail(event.transfer, error.failure)
            return
        one.sequence = self._sequence_of(one.request_id)
        self._exports[one.request_id] = one

    def before_release(self, sequence: Sequence) -> None:
        """A sequence has ended, and its blocks are about to be released: keep those that are not exported yet."""
        one = self._exports.get(sequence.request.request_id)
        if one and one.sequence is sequence:
            if sequence.num_computed == one.num_tokens:
                one.blocks, one.num_cached = list(sequence.blocks), sequence.num_cached_tokens or 0
                self._kv.hold_blocks(one.blocks)
            one.sequence = None

    def take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Handle the deltas of this module's requests; returns the others."""
        own = [delta for delta in deltas if delta.request_id.startswith(ID_PREFIX)]
        if not own:
            return deltas
        for delta in own:
            if delta.failure and (one := self._exports.pop(delta.request_id, None)):
                self._kv.release_blocks(one.blocks)
                self._endpoint.fail(one.start.transfer, delta.failure)
        return [delta for delta in deltas if not delta.request_id.startswith(ID_PREFIX)]

    def poll(self) -> None:
        """Export what has been computed, as far as there is room in the buffer. Raises ``WorkerLostError``."""
        for one in list(self._exports.values()):
            self._export(one)
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
            self._endpoint.offer(transfer, exported, 0, self._num_layers)
        in_progress = {transfer for _, transfer, _ in self._calls}
        while self._finishing and self._finishing[0][0] not in in_progress:
            self._endpoint.finish(*self._finishing.popleft())

    def _export(self, one: _Export) -> None:
        """Export the slots whose tokens have all been computed."""
        computed = one.num_computed
        blocks = one.blocks if one.sequence is None else one.sequence.blocks
        exported: list[Exported] = []
        slots, places = [], []
        while one.num_exported < computed:
            index = one.num_exported // SLOT_TOKENS
            end = min((index + 1) * SLOT_TOKENS, one.num_tokens)
            if end > computed or (allocated := self._buffer.allocate()) is None:
                break
            slot, epoch = allocated
            exported.append(Exported(index, slot, epoch))
            slots.append(self._kv.slot_mapping(blocks, one.num_exported, end))
            places.append(np.arange(slot * SLOT_TOKENS, slot * SLOT_TOKENS + end - one.num_exported))
            one.num_exported = end
        if not exported:
            return
        call = ExportKV(0, self._num_layers, np.concatenate(slots), np.concatenate(places))
        self._calls.append((self._executor.call(call), one.start.transfer, exported))
        if one.num_exported == one.num_tokens:
            self._exports.pop(one.request_id)
            self._kv.release_blocks(one.blocks)  # the workers export them before they compute anything else
            self._finishing.append((one.start.transfer, one.num_cached))
