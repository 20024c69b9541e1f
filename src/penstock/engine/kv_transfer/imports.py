"""The decode engine's side of KV transfers: requests wait until the keys and values of their prompts are imported into
blocks of the KV cache, between the steps of other requests."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config.options import EngineOptions
from penstock.core import Code, EngineRequest, Failure, PenstockError

from ..executor.base import Executor, WorkerLostError
from ..kv.cache_manager import ImportedPrefix, KVCacheManager
from ..scheduling.prerequisites import Prerequisite
from ..sequence.sequence import Sequence
from ..step import ImportKV, ImportState
from .buffer import SLOT_TOKENS
from .endpoint import Endpoint
from .messages import Start, slot_hashes
from .receiver import Arrived, Broken, Completed, Pull, new_transfer_id

if TYPE_CHECKING:
    from penstock.tracing import Span, Tracer

logger = logging.getLogger(__name__)

MIN_TOKENS = 32
"""Minimum number of tokens to import. A shorter prompt is computed here, in little more time than one token."""
MAX_IMPORT_BYTES = 32 * 2**20
"""Maximum number of bytes imported between two steps, which limits the delay of running requests."""


class _ImportFuture(Future[ImportedPrefix | None]):
    """Future of an import. The owner takes the blocks and sets ``taken``, or calls ``cancel``, which releases the
    blocks."""

    def __init__(self, kv: KVCacheManager) -> None:
        super().__init__()
        self._kv = kv
        self.taken = False

    def cancel(self) -> bool:
        if super().cancel():
            return True
        if not self.taken and not self.exception() and (prefix := self.result()):
            self._kv.release_import(prefix)
        self.taken = True
        return False


class _Import:
    """A request with a prompt that a prefill engine computes.

    Args:
        adapter: name of the request's adapter.
    """

    def __init__(self, request: EngineRequest, adapter: str, future: _ImportFuture, kv: KVCacheManager) -> None:
        self.request = request
        self.adapter = adapter
        self.future = future
        self.num_tokens = len(request.prompt) - 1
        """Number of prompt tokens to import: all except the last one, which is computed here for its logits."""
        self.block_hashes = kv.prompt_hashes(request, self.num_tokens)
        self.addresses = deque(request.prefill)
        """Addresses of prefill engines not tried yet."""
        self.address = ""
        """Address of the current prefill engine."""
        self.blocks: list[int] = []
        """Blocks of the tokens to import, with a reference each."""
        self.num_present = 0
        """Number of leading tokens found in the prefix cache."""
        self.snapshot = -1
        """Snapshot for the recurrent states after these tokens; -1 without such states."""
        self.transfer = b""
        """Id of the current transfer."""
        self.end: Completed | Failure | None = None
        """Result of the current transfer, a failure if the request was cancelled; None until the transfer ends."""
        self.outdated = False
        """True if the KV cache was emptied after the import had started."""
        self.num_importing = 0
        """Number of pieces that arrived and are not yet imported or dropped."""
        self.span: Span | None = None
        """Span of the current transfer; None if the request is not traced."""
        self.started = time.monotonic()
        """Time of the start, seconds on the monotonic clock."""


class KVImports:
    """Imports the prompts of requests. Not thread-safe: use it in the engine's thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        executor: Executor,
        kv: KVCacheManager,
        options: EngineOptions,
        weights_version: str,
    ) -> None:
        self._by_priority = options.scheduling_policy == "priority"
        """True if imports start in the order of ``EngineRequest.priority``."""
        self._timeout = options.kv_timeout
        """Maximum seconds that the first request in the queue waits for free blocks before it is computed here."""
        self._recompute = options.kv_load_failure == "recompute"
        """True if a prompt is computed here after its transfers failed; otherwise the request fails."""
        self._endpoint = endpoint
        self._executor = executor
        self._kv = kv
        self._weights_version = weights_version
        self._queue: deque[_Import] = deque()
        """Imports not started yet, in scheduling order."""
        self._first_since = 0.0
        """Time at which the first import became the first in the queue, seconds on the monotonic clock."""
        self._active: dict[bytes, _Import] = {}
        """Started imports, by current transfer."""
        self._arrivals: deque[tuple[_Import, Arrived]] = deque()
        """Pieces to import, each with its import."""
        self._calls: list[tuple[Future[Any], list[tuple[_Import, Arrived]]]] = []
        """Unfinished ``ImportKV`` calls, each with its pieces."""
        self.suspended = False
        """True if the engine sleeps and has no KV cache: no import starts."""
        self.tracer: Tracer | None = None
        """Creates a span for each transfer; None if tracing is off."""
        self.num_recomputed = 0
        """Number of requests computed here because their transfers failed."""
        self.seconds = 0.0
        """Total duration of completed transfers in seconds, including the computation by prefill engines."""

    def prerequisite(self, request: EngineRequest, adapter: str) -> Prerequisite | None:
        """Queue the import of a request's prompt. Returns the prerequisite for which the request has to wait; None if
        the prompt is computed here.

        Args:
            request: request with the adapter's version as ``adapter``.
            adapter: name of the adapter.
        """
        sampling = request.sampling
        needs_all = sampling.prompt_logprobs is not None or sampling.return_context_logits or request.pooling
        if not request.prefill or needs_all or len(request.prompt) <= MIN_TOKENS:
            return None
        future = _ImportFuture(self._kv)
        if not self._queue:
            self._first_since = time.monotonic()
        self._queue.append(_Import(request, adapter, future, self._kv))
        if self._by_priority:  # the sort is stable: requests of equal priority are in the order of arrival
            self._queue = deque(sorted(self._queue, key=lambda entry: entry.request.priority))

        def apply(sequence: Sequence, prefix: ImportedPrefix | None) -> None:
            future.taken = True
            if prefix:
                self._kv.attach_import(sequence, prefix)

        return Prerequisite(future, apply)

    def set_weights(self, version: str) -> None:
        """Import only KV of this version of the weights. Call this when the KV cache was emptied.

        Prompts of active imports are computed here, since some of their blocks may come from the emptied prefix cache.
        """
        self._weights_version = version
        for entry in (*self._queue, *self._active.values()):
            entry.block_hashes = self._kv.prompt_hashes(entry.request, entry.num_tokens)
        for entry in self._active.values():
            self._endpoint.stop(entry.transfer)
            entry.end, entry.outdated = Failure(Code.UNAVAILABLE, "the KV cache was emptied during the transfer"), True
            entry.addresses.clear()

    @property
    def busy(self) -> bool:
        """True if ``poll`` must be called again soon, even without an event."""
        cancelled = any(entry.future.cancelled() and entry.end is None for entry in self._active.values())
        return bool(self._arrivals or self._calls) or cancelled

    def handle(self, event: Arrived | Completed | Broken) -> None:
        """Handle an event of the endpoint."""
        entry = self._active.get(event.transfer)
        if entry is None or entry.end:
            if isinstance(event, Arrived):
                self._endpoint.imported([event])
        elif isinstance(event, Arrived):
            entry.num_importing += 1
            self._arrivals.append((entry, event))
        else:
            entry.end = event if isinstance(event, Completed) else event.failure

    def poll(self) -> None:
        """Start imports for which blocks are free, import arrived pieces, and complete futures. Raises
        ``WorkerLostError``."""
        for entry in self._active.values():
            if entry.future.cancelled() and entry.end is None:
                self._endpoint.stop(entry.transfer)
                entry.end = Failure(Code.UNAVAILABLE, "the request was cancelled")
        self._import_arrived()
        if self._calls:
            self._executor.poll()
            for call in [call for call in self._calls if call[0].done()]:
                self._calls.remove(call)
                self._finish_call(*call)
        for entry in [entry for entry in self._active.values() if entry.end and not entry.num_importing]:
            self._settle(entry)
        while self._queue and (self._queue[0].future.cancelled() or self._begin(self._queue[0])):
            self._queue.popleft()
            self._first_since = time.monotonic()

    def _begin(self, entry: _Import) -> bool:
        """Start an import. Returns False if it must wait: not enough blocks are free, or imports are suspended."""
        if self.suspended:
            self._first_since = time.monotonic()
            return False
        begun = self._kv.begin_import(entry.block_hashes, entry.num_tokens, MIN_TOKENS)
        if begun and begun[1] and self._endpoint.buffer.state_slots:
            snapshot = self._kv.snapshots.take() if self._kv.snapshots else None
            if snapshot is None:
                self._kv.release_import(ImportedPrefix(0, begun[1], 0))
                begun = None
            else:
                entry.snapshot = snapshot
        if begun is None:
            if time.monotonic() - self._first_since < self._timeout:
                return False
            begun = 0, []
        entry.num_present, entry.blocks = begun
        if entry.blocks:
            entry.started = time.monotonic()
            self._pull(entry)
        else:  # almost all tokens are cached, or blocks were not free in time
            entry.future.set_result(None)
        return True

    def _pull(self, entry: _Import) -> None:
        """Start a transfer from the next prefill engine."""
        request, tokens = entry.request, entry.request.prompt[: entry.num_tokens]
        buffer = self._endpoint.buffer
        entry.transfer, entry.end = new_transfer_id(), None
        self._active[entry.transfer] = entry
        entry.address, trace = entry.addresses.popleft(), request.trace
        if self.tracer and request.is_sampled:
            attributes = {
                "server.address": entry.address,
                "penstock.kv_transfer.id": entry.transfer.hex(),
                "penstock.kv_transfer.tokens": entry.num_tokens - entry.num_present,
                "penstock.kv_transfer.present_tokens": entry.num_present,
            }
            entry.span = self.tracer.span("kv_transfer", trace, time.monotonic(), attributes)
            trace = entry.span.context
        start = Start(
            transfer=entry.transfer,
            request_id=request.log_name,
            tokens=tokens,
            first_slot=min(entry.num_present, entry.num_tokens - 1) // SLOT_TOKENS if buffer.has_tokens else 0,
            adapter=entry.adapter,
            adapter_version=request.adapter,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout=max(request.deadline - time.monotonic(), 0.001) if request.deadline else 0.0,
            trace=trace,
        )
        hashes = slot_hashes(
            self._weights_version, request.adapter, request.cache_salt, tokens, buffer.state_slots, buffer.has_tokens
        )
        self._endpoint.pull(entry.address, Pull(start=start, hashes=hashes))

    def _import_arrived(self) -> None:
        """Call the workers to import arrived pieces, up to ``MAX_IMPORT_BYTES``."""
        batches: dict[tuple[int, int], list[tuple[_Import, Arrived]]] = {}
        size = 0
        while self._arrivals and size < MAX_IMPORT_BYTES:
            entry, arrived = self._arrivals.popleft()
            if entry.end and not isinstance(entry.end, Completed):
                self._drop(entry, arrived)
                continue
            size += arrived.size
            if arrived.index >= self._endpoint.buffer.token_slots(entry.num_tokens):
                self._import_state(entry, arrived)
                continue
            batches.setdefault((arrived.first_layer, arrived.last_layer), []).append((entry, arrived))
        for (first_layer, last_layer), arrivals in batches.items():
            slots, places = [], []
            for entry, arrived in arrivals:
                # Never write cached blocks: other sequences may share them.
                begin = max(arrived.index * SLOT_TOKENS, entry.num_present)
                end = min((arrived.index + 1) * SLOT_TOKENS, entry.num_tokens)
                slots.append(self._kv.slot_mapping(entry.blocks, begin, end))
                offset = (arrived.slot - arrived.index) * SLOT_TOKENS
                places.append(np.arange(offset + begin, offset + end))
            call = ImportKV(first_layer, last_layer, np.concatenate(slots), np.concatenate(places))
            self._calls.append((self._executor.call(call), arrivals))

    def _import_state(self, entry: _Import, arrived: Arrived) -> None:
        """Call the workers to import a part of the recurrent states."""
        index = arrived.index - self._endpoint.buffer.token_slots(entry.num_tokens)
        call = ImportState(entry.snapshot, index, self._endpoint.buffer.state_slots, arrived.slot)
        self._calls.append((self._executor.call(call), [(entry, arrived)]))

    def _finish_call(self, done: Future[Any], arrivals: list[tuple[_Import, Arrived]]) -> None:
        """Handle the end of an ``ImportKV`` call. Raises ``WorkerLostError``."""
        error = done.exception()
        if isinstance(error, WorkerLostError):
            raise error
        for entry, arrived in arrivals:
            self._drop(entry, arrived)
            if error and isinstance(entry.end, Completed | None):
                logger.error("keys and values could not be imported", exc_info=error)
                self._endpoint.stop(entry.transfer)
                entry.end = Failure(Code.INTERNAL, "keys and values could not be imported; see the server's log")

    def _drop(self, entry: _Import, arrived: Arrived) -> None:
        """Free the memory of a piece after the workers have read it, or if they do not need it."""
        entry.num_importing -= 1
        self._endpoint.imported([arrived])

    def _settle(self, entry: _Import) -> None:
        """Handle the end of a transfer after its pieces were imported or dropped: complete the import, try another
        prefill engine, or apply ``kv_load_failure``."""
        del self._active[entry.transfer]
        assert entry.end is not None
        if entry.span:
            if isinstance(entry.end, Completed):
                entry.span.set({"penstock.kv_transfer.remote_cached_tokens": entry.end.num_cached})
            else:
                entry.span.fail(entry.end.code.value, entry.end.message)
            entry.span.end()
        if isinstance(entry.end, Completed):
            seconds = time.monotonic() - entry.started
            self.seconds += seconds
            num_cached = max(entry.num_present, entry.end.num_cached)
            message = "request %s: transfer %s: %d tokens from %s in %.3f seconds; %d tokens were in the prefix cache"
            count, name = entry.num_tokens - entry.num_present, entry.request.log_name
            transferred = name, entry.transfer.hex()[:8], count, entry.address, seconds, entry.num_present
            logger.info(message, *transferred, extra={"fields": entry.request.log_fields})
            prefix = self._kv.finish_import(
                entry.block_hashes, entry.blocks, entry.num_tokens, num_cached, entry.snapshot
            )
            if entry.future.cancelled():
                self._kv.release_import(prefix)
            else:
                entry.future.set_result(prefix)
            return
        if entry.future.cancelled():
            self._kv.release_import(ImportedPrefix(0, entry.blocks, 0, snapshot=entry.snapshot))
            return
        left = bool(entry.addresses)
        recompute = self._recompute or entry.outdated
        consequence = "trying another instance" if left else "computing it here" if recompute else "the request fails"
        message = "request %s: the prompt's transfer from a prefill instance failed (%s); %s"
        values = entry.request.log_name, entry.end.message, consequence
        logger.warning(message, *values, extra={"fields": entry.request.log_fields})
        if left:
            self._pull(entry)
            return
        self._kv.release_import(ImportedPrefix(0, entry.blocks, 0, snapshot=entry.snapshot))
        if recompute:
            self.num_recomputed += 1
            entry.future.set_result(None)
        else:
            message = f"the prompt's transfer from a prefill instance failed: {entry.end.message}"
            error = PenstockError(Code.UNAVAILABLE, f"{message} (--kv-load-failure fail)")
            entry.future.set_exception(error)
