"""Admission: validation of requests, and limits on the number and the time of waiting requests."""

from __future__ import annotations

import bisect
import math
import random
import time
from collections.abc import Iterator

import msgspec

from penstock.core import Code, EngineRequest, Failure, PenstockError
from penstock.core.errors import invalid, too_long

from ..guided.reasoning_guide import make_guide
from ..kv.cache_manager import KVCacheManager
from ..sequence.mrope import next_position
from ..sequence.sequence import Sequence, State
from .prerequisites import Prerequisite, Prerequisites
from .state import SchedulerState


class FreeCapacity:
    """Free rows and KV blocks, assigned to the waiting sequences in their order until one does not fit.

    Args:
        num_rows: number of free rows in the batch.
        alone: True if no sequence runs; the first waiting sequence then always fits.
    """

    def __init__(self, kv: KVCacheManager, num_rows: int, alone: bool) -> None:
        self.num_startable = 0
        """Number of sequences that fit."""
        self._kv = kv
        self._num_rows = num_rows
        self._num_blocks = kv.num_blocks_for_starts
        self._alone = alone
        self._full = False
        """True once a sequence did not fit."""

    def fits(self, sequence: Sequence) -> bool:
        """True if ``sequence``, and the sequences to fork from it, could start in the remaining capacity."""
        if self._full or 1 + sequence.num_unforked > self._num_rows:
            return False
        return (self._alone and not self.num_startable) or self._kv.num_blocks_to_start(sequence) <= self._num_blocks

    def take(self, sequence: Sequence) -> None:
        """Assign capacity to the next sequence of the queue. After the first one that does not fit, no other fits."""
        self._full = not self.fits(sequence)
        if not self._full:
            self.num_startable += 1
            self._num_rows -= 1 + sequence.num_unforked
            self._num_blocks -= self._kv.num_blocks_to_start(sequence)


class Admission:
    """Validates requests, queues them, and enforces their time limits. The scheduler reports sequences that start
    (``record_start``) or end before they start (``remove_sequence``), and requests that end (``remove_request``).
    """

    def __init__(self, state: SchedulerState) -> None:
        self.prerequisites = Prerequisites()
        """First sequences of accepted requests that are not queued yet, each with the futures for which it waits."""
        self._options, self._device_pool, self._kv = state.options, state.device_pool, state.kv
        self._running, self._waiting = state.running, state.waiting
        self._external_ids: set[str] = set()  # ids of unfinished requests
        self._deadlines: list[tuple[float, int, str]] = []
        """Deadline, order of arrival and id of each request with a deadline; sorted."""
        self._queue_timeouts: dict[Sequence, None] = {}
        """Ordered set of sequences without a step yet, the oldest first; only with ``max_queue_time``."""
        self._arrivals = 0
        self._free_capacity: FreeCapacity | None = None
        """Capacity that the waiting sequences leave free; None if it has to be computed again."""

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait in the queue or for prerequisites."""
        return len(self._waiting) + len(self.prerequisites)

    def validate_and_clamp(self, request: EngineRequest) -> EngineRequest:
        """Validate a request. Returns it with ``max_tokens`` clamped to the context length.

        Raises ``PenstockError`` (``invalid``, ``too_long``) if it can never run.
        """
        options, sampling = self._options, request.sampling
        if not request.prompt:
            raise invalid("prompt", "must have at least one token, has 0")
        tokens, limit = len(request.prompt), options.max_model_len
        room = limit - tokens
        if request.pooling:
            if room < 0:
                message = f"has {tokens} tokens, but the context has {limit} (max_model_len); shorten the prompt"
                raise too_long("prompt", message, tokens, limit)
            room = 1  # an embedding request generates no token
        if room < 1:
            message = f"has {tokens} tokens, but at most {limit - 1} leave room for an output token (max_model_len)"
            raise too_long("prompt", f"{message}; shorten the prompt", tokens, limit)
        if request.images and (position := next_position(tokens, request.images)) > tokens:
            room = min(room, limit - position)  # a video may take more temporal positions than tokens
            if room < 1:
                message = f"end at position {position}, but the context ends at {limit} (max_model_len); "
                message += "sample more frames per second"
                raise invalid("videos", message, limit)
        if 0 < (limit := options.max_prompt_len) < tokens:
            raise invalid("prompt", f"has {tokens} tokens, more than max_prompt_len ({limit})", limit)
        if 0 < (limit := options.max_output_len) < (sampling.max_tokens or 0):
            raise invalid("max_tokens", f"{sampling.max_tokens} is more than max_output_len ({limit})", limit)
        if sampling.num_sequences > options.max_num_seqs:
            field = "n" if sampling.best_of is None else "best_of"
            message = f"must be at most max_num_seqs ({options.max_num_seqs}), is {sampling.num_sequences}"
            raise invalid(field, message, options.max_num_seqs)
        if request.deadline is not None and not math.isfinite(request.deadline):
            raise invalid("deadline", f"must be a finite number of seconds, is {request.deadline}")
        self._check_images(request)
        if request.resumed:
            self._check_resumed(request)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_token_ids)}
        allowed = set(sampling.allowed_token_ids or ()) - sampling.banned_token_ids
        if allowed and sampling.min_tokens and stops.issuperset(allowed):
            message = f"must be 0 if every allowed token ends the sequence, is {sampling.min_tokens}"
            raise invalid("min_tokens", message, 0)
        max_tokens = min(sampling.max_tokens or room, options.max_output_len or room, room)
        if any(len(one.token_ids) >= max_tokens for one in request.resumed if not one.finished):
            raise invalid("resumed", f"has more tokens than max_tokens ({max_tokens}) allows", max_tokens)
        if max_tokens != sampling.max_tokens:
            request = msgspec.structs.replace(request, sampling=sampling.replace(max_tokens=max_tokens))
        all_at_once = options.batch_scheduler_policy == "guaranteed_no_evict" or sampling.use_beam_search
        if all_at_once and (blocks := self._kv.worst_case_blocks(request)) > (total := self._device_pool.total):
            message = (
                f"{sampling.num_sequences} sequences of up to {tokens + max_tokens} tokens take {blocks} KV blocks, "
            )
            raise invalid("n", message + f"but the KV cache has {total}; reduce n or max_tokens")
        return request

    def _check_images(self, request: EngineRequest) -> None:
        """Raise ``PenstockError`` if an image, or without chunked prefill the sum of all images, exceeds the encoder
        cache, or a bidirectional image exceeds the token budget of a step."""
        limit = self._options.encoder_cache_size
        sizes = [image.length for image in request.images]
        largest = max(sizes, default=0) if self._options.enable_chunked_prefill else sum(sizes)
        if largest > limit:
            message = f"take {largest} tokens, more than encoder_cache_size ({limit}); send smaller images"
            raise invalid("images", message, limit)
        largest = max((image.length for image in request.images if image.bidirectional), default=0)
        if largest > (limit := self._options.max_num_batched_tokens):
            message = f"take {largest} tokens in one step, but max_num_batched_tokens is {limit}; send smaller images"
            raise invalid("images", message, limit)

    @staticmethod
    def _check_resumed(request: EngineRequest) -> None:
        sampling = request.sampling
        if request.pooling or sampling.use_beam_search:
            raise invalid("resumed", "must be empty for pooling and beam search, which return no partial output")
        if len(request.resumed) != sampling.num_sequences:
            message = f"has {len(request.resumed)} sequences, but the request has {sampling.num_sequences}"
            raise invalid("resumed", message, sampling.num_sequences)
        if all(generated.finished for generated in request.resumed):
            raise invalid("resumed", "has only finished sequences")

    def new_sequences(self, request: EngineRequest) -> list[Sequence]:
        """Create the first sequence of a validated request, or all sequences of a resumed one.

        Raises ``PenstockError`` (``invalid``) if its ``external_id`` is in use.
        """
        if request.external_id in self._external_ids:
            name = request.external_id.rpartition("\0")[2]  # removes the tenant
            message = f"{name[:200]!r} already exists: an unfinished request has this id; send another id"
            raise invalid("external_id", message)
        seed = random.getrandbits(63) if request.sampling.seed is None else request.sampling.seed
        sequences = [Sequence(request, index, seed, self._arrivals) for index in range(len(request.resumed) or 1)]
        for sequence, generated in zip(sequences, request.resumed, strict=False):
            sequence.resume(generated)
        if request.reasoning:
            for sequence in sequences:
                sequence.set_guide(make_guide(request, None))
        return sequences

    def check_queue(self, first: Sequence) -> None:
        """Raise ``PenstockError`` (``overloaded``) if the queue is full. Waiting sequences that could start at once, in
        free rows and KV blocks, do not count."""
        limit = self._options.max_waiting
        if self.num_waiting < limit:
            return
        if self._free_capacity is None:
            joins = not self._running or self._options.batching_type == "inflight"
            num_rows = self._running.num_free_rows if joins else 0
            self._free_capacity = FreeCapacity(self._kv, num_rows, alone=not self._running)
            for sequence in (*self._waiting, *self.prerequisites):
                self._free_capacity.take(sequence)
        if self.num_waiting - self._free_capacity.num_startable - self._free_capacity.fits(first) >= limit:
            message = f"{self.num_waiting} sequences are waiting, and max_waiting is {limit}; try again later"
            raise PenstockError(Code.OVERLOADED, message, "max_waiting", limit)

    def invalidate_free_capacity(self) -> None:
        """Discard the free capacity. Call this when rows or KV blocks were allocated or freed."""
        self._free_capacity = None

    def enqueue(self, sequences: list[Sequence], prerequisites: list[Prerequisite]) -> None:
        """Queue a request's unfinished sequences: immediately, or, with ``prerequisites``, in ``enqueue_prepared`` once
        they are done."""
        first, *others = [sequence for sequence in sequences if sequence.state is not State.FINISHED]
        required = prerequisites
        for sequence in (first, *others):
            if required:
                self.prerequisites.add(sequence, required)
            else:
                self._waiting.push(sequence)
            if self._free_capacity:
                self._free_capacity.take(sequence)
            required = [each if each.every_sequence else Prerequisite(each.future, _ignore) for each in prerequisites]
        self._arrivals += 1
        request = first.request
        if request.external_id:
            self._external_ids.add(request.external_id)
        if request.deadline is not None:
            bisect.insort(self._deadlines, (request.deadline, first.arrival_order, request.request_id))
        if self._options.max_queue_time and not request.resumed:
            self._queue_timeouts[first] = None

    def enqueue_prepared(self) -> Iterator[tuple[str, Failure]]:
        """Queue sequences whose prerequisites are done. Yields id and failure of requests whose prerequisites failed;
        the caller has to abort these requests."""
        for sequence, failure in self.prerequisites.apply_done():
            if failure:
                yield sequence.request.request_id, failure
            else:
                self.prerequisites.remove(sequence)
                self._waiting.push(sequence)

    def overdue(self, now: float) -> Iterator[tuple[str, Failure]]:
        """Yield id and failure of requests that have waited longer than ``max_queue_time`` for their first step, or
        whose deadline has passed. The caller has to abort each request before taking the next one.

        Args:
            now: seconds on the monotonic clock.
        """
        limit = self._options.max_queue_time
        while (first := next(iter(self._queue_timeouts), None)) and now - first.arrived > limit:  # oldest first
            message = f"the request has waited {limit:g} seconds in the queue (max_queue_time); try again later"
            yield first.request.request_id, Failure(Code.OVERLOADED, message, "max_queue_time", limit)
        while self._deadlines and self._deadlines[0][0] <= now:
            yield self._deadlines[0][2], Failure(Code.TIMEOUT, "the deadline has passed")

    def record_start(self, sequence: Sequence, cached: int) -> None:
        """Record the first step of a sequence, with ``cached`` tokens from the prefix cache."""
        sequence.num_cached_tokens = min(cached, sequence.prompt_length)
        sequence.first_scheduled = time.monotonic()
        sequence.queued = sequence.first_scheduled - sequence.arrived
        self._queue_timeouts.pop(sequence, None)

    def remove_sequence(self, sequence: Sequence) -> bool:
        """Remove a sequence that ends while it waits. Returns True if it was waiting for prerequisites. Otherwise the
        caller has to remove the sequence from the queue."""
        self._queue_timeouts.pop(sequence, None)
        return self.prerequisites.remove(sequence)

    def remove_request(self, first: Sequence) -> None:
        """Remove the external id and the deadline of an ended request, given its first sequence."""
        self._external_ids.discard(first.request.external_id)
        if (deadline := first.request.deadline) is not None:
            del self._deadlines[bisect.bisect_left(self._deadlines, (deadline, first.arrival_order))]


def _ignore(sequence: Sequence, result: object) -> None:
    """Callback of a prerequisite whose result is used by another sequence of the request."""
