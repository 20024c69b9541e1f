"""A decode engine's part of KV transfers: requests wait while keys and values of their prompts are imported into blocks
of the KV cache, between the steps of other requests."""

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
from ..step import ImportKV
from .buffer import SLOT_TOKENS
from .endpoint import Endpoint
from .messages import Start, slot_hashes
from .receiver import Arrived, Broken, Completed, Pull, new_transfer_id

if TYPE_CHECKING:
    from penstock.tracing import Span, Tracer

logger = logging.getLogger(__name__)

MIN_TOKENS = 32
"""Prompts with fewer tokens to compute are computed here: the step costs little more than that of one token."""
MAX_IMPORT_BYTES = 32 * 2**20
"""Bytes imported between two steps, so that running requests do not wait for long."""


class _ImportFuture(Future[ImportedPrefix | None]):
    """The result of an import. Whoever waits for it takes the blocks, or cancels it."""

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
    """A request whose prompt a prefill engine computes.

    Args:
        adapter: name of its adapter.
    """

    def __init__(self, request: EngineRequest, adapter: str, future: _ImportFuture, kv: KVCacheManager) -> None:
        self.request = request
        self.adapter = adapter
        self.future = future
        self.num_tokens = len(request.prompt) - 1
        """Tokens to import: the last one is computed here, which gives the logits."""
        self.block_hashes = kv.prompt_hashes(request, self.num_tokens)
        self.addresses = deque(request.prefill)
        """Prefill engines that have not been tried."""
        self.address = ""
        """The one that is asked."""
        self.blocks: list[int] = []
        """Blocks of the tokens to import, referenced."""
        self.num_present = 0
        """Leading tokens that were in the prefix cache."""
        self.transfer = b""
        """The transfer under way."""
        self.end: Completed | Failure | None = None
        """How that transfer has ended; None while it goes on. A request that was cancelled has a failure."""
        self.outdated = False
        """Whether the KV cache was emptied since it began."""
        self.num_importing = 0
        """Pieces that the workers are importing."""
        self.span: Span | None = None
        """Of the transfer under way, where the request is traced."""
        self.started = time.monotonic()


class KVImports:
    """Use it in the thread that runs the steps."""

    def __init__(
        self,
        endpoint: Endpoint,
        executor: Executor,
        kv: KVCacheManager,
        options: EngineOptions,
        weights_version: str,
    ) -> None:
        self._by_priority = options.scheduling_policy == "priority"
        """Whether requests begin in the order of their ``priority``."""
        self._timeout = options.kv_timeout
        """Seconds that the first prompt in the queue waits for free blocks before it is computed here."""
        self._recompute = options.kv_load_failure == "recompute"
        """Whether a prompt whose transfers fail is computed here; otherwise its request fails."""
        self._endpoint = endpoint
        self._executor = executor
        self._kv = kv
        self._weights_version = weights_version
        self._queue: deque[_Import] = deque()
        """Imports that have not begun, in the order in which they will."""
        self._first_since = 0.0
        """Since when the first of them is the first."""
        self._active: dict[bytes, _Import] = {}
        """Transfer → import."""
        self._arrivals: deque[tuple[_Import, Arrived]] = deque()
        self._calls: list[tuple[Future[Any], list[tuple[_Import, Arrived]]]] = []
        self.suspended = False
        """Whether no import begins, as there is no KV cache."""
        self.tracer: Tracer | None = None
        """Makes a span of each transfer; None without traces."""
        self.num_recomputed = 0
        """Requests whose prompts were computed here since their transfers failed."""
        self.seconds = 0.0
        """Time of all completed transfers, the computation by prefill engines included."""

    def prerequisite(self, request: EngineRequest, adapter: str) -> Prerequisite | None:
        """What a request has to wait for; None where its prompt is to be computed here.

        Args:
            request: with the version of its adapter as ``adapter``.
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
        if self._by_priority:  # a stable sort: of equal ones the first comes first
            self._queue = deque(sorted(self._queue, key=lambda one: one.request.priority))

        def apply(sequence: Sequence, prefix: ImportedPrefix | None) -> None:
            future.taken = True
            if prefix:
                self._kv.attach_import(sequence, prefix)

        return Prerequisite(future, apply)

    def set_weights(self, version: str) -> None:
        """Import KV of this version of the weights from now on, into a KV cache that is empty.

        Prompts whose imports are under way are computed here, as some of their blocks may be those of cached prefixes.
        """
        self._weights_version = version
        for one in (*self._queue, *self._active.values()):
            one.block_hashes = self._kv.prompt_hashes(one.request, one.num_tokens)
        for one in self._active.values():
            self._endpoint.stop(one.transfer)
            one.end, one.outdated = Failure(Code.UNAVAILABLE, "the KV cache was emptied meanwhile"), True
            one.addresses.clear()

    @property
    def busy(self) -> bool:
        """Whether ``poll`` has to be called again soon, though no event comes."""
        cancelled = any(one.future.cancelled() and one.end is None for one in self._active.values())
        return bool(self._arrivals or self._calls) or cancelled

    def handle(self, event: Arrived | Completed | Broken) -> None:
        """Handle an event of the endpoint."""
        one = self._active.get(event.transfer)
        if one is None or one.end:
            if isinstance(event, Arrived):
                self._endpoint.imported([event])
        elif isinstance(event, Arrived):
            one.num_importing += 1
            self._arrivals.append((one, event))
        else:
            one.end = event if isinstance(event, Completed) else event.failure

    def poll(self) -> None:
        """Begin imports for which there are free blocks, import what has arrived, and complete futures. Raises
        ``WorkerLostError``."""
        for one in self._active.values():
            if one.future.cancelled() and one.end is None:
                self._endpoint.stop(one.transfer)
                one.end = Failure(Code.UNAVAILABLE, "the request was cancelled")
        self._import_arrived()
        if self._calls:
            self._executor.poll()
            for call in [call for call in self._calls if call[0].done()]:
                self._calls.remove(call)
                self._finish_call(*call)
        for one in [one for one in self._active.values() if one.end and not one.num_importing]:
            self._settle(one)
        while self._queue and (self._queue[0].future.cancelled() or self._begin(self._queue[0])):
            self._queue.popleft()
            self._first_since = time.monotonic()

    def _begin(self, one: _Import) -> bool:
        """Begin an import. Returns False where too few blocks are free, or there is no KV cache."""
        if self.suspended:
            self._first_since = time.monotonic()
            return False
        begun = self._kv.begin_import(one.block_hashes, one.num_tokens, MIN_TOKENS)
        if begun is None:
            if time.monotonic() - self._first_since < self._timeout:
                return False
            begun = 0, []
        one.num_present, one.blocks = begun
        if one.blocks:
            one.started = time.monotonic()
            self._pull(one)
        else:  # most of it is cached and a transfer not worth it, or there is no room
            one.future.set_result(None)
        return True

    def _pull(self, one: _Import) -> None:
        """Ask the next prefill engine."""
        request, tokens = one.request, one.request.prompt[: one.num_tokens]
        one.transfer, one.end = new_transfer_id(), None
        self._active[one.transfer] = one
        one.address, trace = one.addresses.popleft(), request.trace
        if self.tracer and request.is_sampled:
            attributes = {
                "server.address": one.address,
                "penstock.kv_transfer.id": one.transfer.hex(),
                "penstock.kv_transfer.tokens": one.num_tokens - one.num_present,
                "penstock.kv_transfer.present_tokens": one.num_present,
            }
            one.span = self.tracer.span("kv_transfer", trace, time.monotonic(), attributes)
            trace = one.span.context
        start = Start(
            transfer=one.transfer,
            request_id=request.log_name,
            tokens=tokens,
            first_slot=one.num_present // SLOT_TOKENS,
            adapter=one.adapter,
            adapter_version=request.adapter,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout=max(request.deadline - time.monotonic(), 0.001) if request.deadline else 0.0,
            trace=trace,
        )
        hashes = slot_hashes(self._weights_version, request.adapter, request.cache_salt, tokens)
        self._endpoint.pull(one.address, Pull(start=start, hashes=hashes))

    def _import_arrived(self) -> None:
        """Send the workers what has arrived, up to ``MAX_IMPORT_BYTES``."""
        batches: dict[tuple[int, int], list[tuple[_Import, Arrived]]] = {}
        size = 0
        while self._arrivals and size < MAX_IMPORT_BYTES:
            one, arrived = self._arrivals.popleft()
            if one.end and not isinstance(one.end, Completed):
                self._drop(one, arrived)
                continue
            size += arrived.size
            batches.setdefault((arrived.first_layer, arrived.last_layer), []).append((one, arrived))
        for (first_layer, last_layer), arrivals in batches.items():
            slots, places = [], []
            for one, arrived in arrivals:
                begin = max(arrived.index * SLOT_TOKENS, one.num_present)  # cached blocks may be shared: never written
                end = min((arrived.index + 1) * SLOT_TOKENS, one.num_tokens)
                slots.append(self._kv.slot_mapping(one.blocks, begin, end))
                offset = (arrived.slot - arrived.index) * SLOT_TOKENS
                places.append(np.arange(offset + begin, offset + end))
            call = ImportKV(first_layer, last_layer, np.concatenate(slots), np.concatenate(places))
            self._calls.append((self._executor.call(call), arrivals))

    def _finish_call(self, done: Future[Any], arrivals: list[tuple[_Import, Arrived]]) -> None:
        error = done.exception()
        if isinstance(error, WorkerLostError):
            raise error
        for one, arrived in arrivals:
            self._drop(one, arrived)
            if error and isinstance(one.end, Completed | None):
                logger.error("keys and values could not be imported", exc_info=error)
                self._endpoint.stop(one.transfer)
                one.end = Failure(Code.INTERNAL, "keys and values could not be imported")

    def _drop(self, one: _Import, arrived: Arrived) -> None:
        """The workers do not read a piece (any more)."""
        one.num_importing -= 1
        self._endpoint.imported([arrived])

    def _settle(self, one: _Import) -> None:
        """A transfer has ended, and nothing of it is being imported: complete the import, ask another prefill engine,
        or follow the policy."""
        del self._active[one.transfer]
        assert one.end is not None
        if one.span:
            if isinstance(one.end, Completed):
                one.span.set({"penstock.kv_transfer.remote_cached_tokens": one.end.num_cached})
            else:
                one.span.fail(one.end.code.value, one.end.message)
            one.span.end()
        if isinstance(one.end, Completed):
            self.seconds += time.monotonic() - one.started
            num_cached = max(one.num_present, one.end.num_cached)
            words = "request %s: transfer %s: %d tokens from %s in %.3f seconds, beside %d that were cached here"
            count, seconds = one.num_tokens - one.num_present, time.monotonic() - one.started
            values = (one.request.log_name, one.transfer.hex()[:8], count, one.address, seconds, one.num_present)
            logger.info(words, *values, extra={"fields": one.request.log_fields})
            prefix = self._kv.finish_import(one.block_hashes, one.blocks, one.num_tokens, num_cached)
            if one.future.cancelled():
                self._kv.release_import(prefix)
            else:
                one.future.set_result(prefix)
            return
        if one.future.cancelled():
            self._kv.release_import(ImportedPrefix(0, one.blocks, 0))
            return
        left = bool(one.addresses)
        recompute = self._recompute or one.outdated
        what = "another is asked" if left else "it is computed here" if recompute else "the request fails"
        words = "request %s: its prompt did not come from a prefill instance, %s: %s"
        facts = one.request.log_fields
        logger.warning(words, one.request.log_name, what, one.end.message, extra={"fields": facts})
        if left:
            self._pull(one)
            return
        self._kv.release_import(ImportedPrefix(0, one.blocks, 0))
        if recompute:
            self.num_recomputed += 1
            one.future.set_result(None)
        else:
            words = f"the prompt did not come from a prefill instance (--kv-load-failure fail): {one.end.message}"
            one.future.set_exception(PenstockError(Code.UNAVAILABLE, words))
