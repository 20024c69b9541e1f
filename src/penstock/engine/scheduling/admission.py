"""Admission: which requests are accepted, what they wait for before they are queued, and for how long they may wait."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator

import msgspec

from penstock.config.options import SchedulerOptions
from penstock.core import Code, EngineRequest, Failure
from penstock.core.errors import invalid, too_long

from ..guided.reasoning import guide_of
from ..kv.block_pool import BlockPool
from ..kv.cache_manager import KVCacheManager
from ..sequence.sequence import Sequence
from .prerequisites import Prerequisite, Prerequisites
from .waiting import Waiting


class Admission:
    """Requests on their way into the queue, and their time limits. The scheduler reports sequences that start
    (``started``) or end (``leave``), and requests that have ended (``forget``).

    Args:
        device: blocks of the KV cache.
        room: what sequences take of them.
        waiting: the queue.
    """

    def __init__(self, options: SchedulerOptions, device: BlockPool, room: KVCacheManager, waiting: Waiting) -> None:
        self.prerequisites = Prerequisites()
        """What requests wait for before they are queued."""
        self._options = options
        self._device = device
        self._kv = room
        self._waiting = waiting
        self._external_ids: set[str] = set()
        self._deadlines: list[tuple[float, int, str]] = []
        """Of the requests that have not ended, the next one first: time, order of arrival, id."""
        self._queue_timeouts: dict[Sequence, None] = {}
        """Those that wait for their first step, in the order of their arrival, where that may not take for ever."""
        self._arrivals = 0

    def fitted(self, request: EngineRequest) -> EngineRequest:
        """The request with ``max_tokens`` that the context has room for.

        Raises ``PenstockError`` (``invalid``) where it can never run.
        """
        options, sampling = self._options, request.sampling
        if not request.prompt:
            raise invalid("prompt", "must hold at least one token")
        tokens, most = len(request.prompt), options.max_model_len
        room = most - tokens
        if request.pooling:
            if room < 0:
                raise too_long("prompt", f"has {tokens} tokens, and at most {most} are taken", tokens, most)
            room = 1  # of which nothing is used
        if room < 1:
            raise too_long("prompt", f"has {tokens} tokens, and at most {most - 1} leave room for one", tokens, most)
        if 0 < (most := options.max_prompt_len) < tokens:
            raise invalid("prompt", f"has {tokens} tokens, more than max_prompt_len ({most})", most)
        if 0 < (most := options.max_output_len) < (sampling.max_tokens or 0):
            raise invalid("max_tokens", f"{sampling.max_tokens} is more than max_output_len ({most})", most)
        if sampling.width > options.max_num_seqs:
            field = "n" if sampling.best_of is None else "best_of"
            raise invalid(field, f"must be at most max_num_seqs ({options.max_num_seqs})", options.max_num_seqs)
        if request.deadline is not None and not math.isfinite(request.deadline):
            raise invalid("deadline", "must be a finite number of seconds")
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_token_ids)}
        allowed = set(sampling.allowed_token_ids or ()) - sampling.never_tokens
        if allowed and sampling.min_tokens and stops.issuperset(allowed):
            raise invalid("min_tokens", "must be 0 where every allowed token ends the sequence", 0)
        max_tokens = min(sampling.max_tokens or room, options.max_output_len or room, room)
        request = msgspec.structs.replace(request, sampling=sampling.replace(max_tokens=max_tokens))
        together = options.batch_scheduler_policy == "guaranteed_no_evict" or sampling.use_beam_search
        if together and self._kv.worst_case_blocks(request) > self._device.total:
            raise invalid("n", "so many sequences of this length do not fit into the KV cache together")
        return request

    def sequence(self, request: EngineRequest) -> Sequence:
        """The first sequence of a request that was ``fitted``.

        Raises ``PenstockError`` (``invalid``) where its client's name for it is in use.
        """
        if request.external_id in self._external_ids:
            words = f"{request.external_id[:200]!r} already exists: a request of this name has not ended"
            raise invalid("external_id", words)
        seed = random.getrandbits(63) if request.sampling.seed is None else request.sampling.seed
        first = Sequence(request, 0, seed, self._arrivals)
        first.guide = guide_of(request, None)
        return first

    def accept(self, first: Sequence, missing: list[Prerequisite]) -> None:
        """Queue a request's first sequence, once nothing is missing."""
        if missing:
            self.prerequisites.add(first, missing)
        else:
            self._waiting.push(first)
        self._arrivals += 1
        request = first.request
        if request.external_id:
            self._external_ids.add(request.external_id)
        if request.deadline is not None:
            bisect.insort(self._deadlines, (request.deadline, first.order, request.request_id))
        if self._options.max_queue_time:
            self._queue_timeouts[first] = None

    def admit_ready(self) -> Iterator[tuple[str, Failure]]:
        """Queue those that miss nothing any more. Yields the requests whose prerequisites have failed, which are to be
        aborted."""
        for sequence, failure in self.prerequisites.ready():
            if failure:
                yield sequence.request.request_id, failure
            else:
                self.prerequisites.remove(sequence)
                self._waiting.push(sequence)

    def overdue(self, now: float) -> Iterator[tuple[str, Failure]]:
        """Requests that have waited too long for their first step, and whose deadline has passed; each is to be aborted
        before the next is asked for."""
        most = self._options.max_queue_time
        # They stand in the order of their arrival: nobody behind one who may still wait has waited longer.
        while (first := next(iter(self._queue_timeouts), None)) and now - first.arrived > most:
            words = f"the request has waited {most:g} seconds and had no turn"
            yield first.request.request_id, Failure(Code.OVERLOADED, words, "max_queue_time", most)
        while self._deadlines and self._deadlines[0][0] <= now:
            yield self._deadlines[0][2], Failure(Code.TIMEOUT, "the deadline has passed")

    def started(self, sequence: Sequence) -> None:
        """A sequence has its first step."""
        self._queue_timeouts.pop(sequence, None)

    def leave(self, sequence: Sequence) -> bool:
        """A sequence ends, wherever it is. Returns whether it was not queued yet."""
        self._queue_timeouts.pop(sequence, None)
        return self.prerequisites.remove(sequence)

    def forget(self, first: Sequence) -> None:
        """A request has ended; ``first`` is its first sequence."""
        self._external_ids.discard(first.request.external_id)
        if (deadline := first.request.deadline) is not None:
            del self._deadlines[bisect.bisect_left(self._deadlines, (deadline, first.order))]
