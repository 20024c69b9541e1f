"""The load balancer: chooses the engine that computes a request, and the instances that may compute its prompt."""

from __future__ import annotations

import random
from typing import NamedTuple
from zlib import crc32

from penstock.core import EngineRequest, PenstockError

from .prefix_index import PrefixIndex
from .replica import Replica

MAX_OVERDUE = 2.0
"""Seconds by which an engine's heartbeat or message may be overdue before other engines are preferred."""


class Choice(NamedTuple):
    """The engines of a request."""

    replica: Replica
    num_uncached: int
    """Estimated number of prompt tokens that the replica has not cached."""
    prefills: list[Replica]
    """Prefill instances that may compute the prompt, the preferred one first; empty: the replica computes it."""


class LoadBalancer:
    """Chooses the replica with the least cost for each request.

    The cost is a number of tokens: uncached tokens of the request's prompt, prompt tokens that the replica has not
    computed yet, tokens for which the replica has no free KV blocks, and ``request_cost`` for each of its open
    requests. So a request is sent to the replica with its longest cached prefix, unless the additional load of that
    replica exceeds the tokens saved. ``PrefixIndex`` estimates the cached prefixes from the requests sent by this
    process. Among equal replicas the choice is random. Requests with an ``external_id`` are assigned by the checksum of
    that id, which must be unique among all processes.

    If there are prefill instances, and a decode instance would have to compute ``min_prefill_tokens`` or more, the
    prefill instances may compute the prompt, in ascending order of the prompt tokens that they have to compute.

    Args:
        replicas: all replicas, kept up to date by the ``EnginePool``.
        request_cost: the option ``data_parallel_request_cost``.
        min_prefill_tokens: the option ``pd_min_prefill_tokens``.
    """

    def __init__(self, replicas: list[Replica], request_cost: int, min_prefill_tokens: int) -> None:
        self._replicas = replicas
        self._request_cost = request_cost
        self._min_prefill_tokens = min_prefill_tokens
        self._prefixes = PrefixIndex()

    def choose(self, request: EngineRequest, available: list[Replica]) -> Choice:
        """Choose the replica of ``available`` that computes a request, and record that it caches the prompt."""
        cached = self._cached_tokens(request)
        replica = self._cheapest(request, available, cached)
        uncached = len(request.prompt) - cached[replica]
        prefills = self._prefill_instances(request, uncached, cached) if replica.takes_kv else []
        for computing in [replica, *prefills[:1]]:
            self.record(request, [], computing)
        return Choice(replica, uncached, prefills)

    def record(self, request: EngineRequest, output: list[int], replica: Replica) -> None:
        """Record that a replica has cached the prompt and ``output`` tokens of a request."""
        if self._has_choice:
            self._prefixes.insert(request, output, replica.number)

    def forget(self, replica: Replica) -> None:
        """Record that a replica has lost its cached prefixes."""
        self._prefixes.remove_replica(replica.number)

    def clear(self) -> None:
        """Record that all replicas have lost their cached prefixes."""
        self._prefixes.clear()

    @property
    def _has_choice(self) -> bool:
        return len(self._replicas) > 1

    def _cached_tokens(self, request: EngineRequest) -> dict[Replica, int]:
        """Estimated number of leading prompt tokens that each replica has cached."""
        if not self._has_choice:
            return dict.fromkeys(self._replicas, 0)
        self._prefixes.set_capacity([replica.client.engine for replica in self._replicas])
        counts = self._prefixes.cached_tokens(request, max(replica.number for replica in self._replicas) + 1)
        return {replica: counts[replica.number] for replica in self._replicas}

    def _cheapest(self, request: EngineRequest, available: list[Replica], cached: dict[Replica, int]) -> Replica:
        """The replica of ``available`` with the least cost for a request."""
        available = [replica for replica in available if replica.has_adapter(request.adapter)] or available
        available = [replica for replica in available if replica.client.overdue < MAX_OVERDUE] or available
        # Rendezvous hashing: all processes choose the same replica, also after other replicas were added or removed.
        if request.external_id:
            return max(available, key=lambda replica: crc32(f"{request.external_id} {replica.address}".encode()))
        length, loads = len(request.prompt), self._loads()
        room = {replica: self._room(replica) for replica in available}

        def cost(replica: Replica) -> tuple[float, int]:
            return loads[replica] + length - cached[replica] + max(length - room[replica], 0), loads[replica]

        random.shuffle(available)  # without this, all processes would choose the first of several equal replicas
        return min(available, key=cost)

    def _prefill_instances(self, request: EngineRequest, uncached: int, cached: dict[Replica, int]) -> list[Replica]:
        """Prefill instances for a request with ``uncached`` prompt tokens on its replica, the preferred instance first;
        empty if the replica should compute the prompt."""
        if uncached < self._min_prefill_tokens or _needs_hidden_states(request):
            return []
        length = len(request.prompt)

        def is_suitable(replica: Replica) -> bool:
            if replica.generates or not replica.kv_address or not replica.has_adapter(request.adapter):
                return False
            try:
                return length <= replica.require_engine().max_model_len
            except PenstockError:
                return False

        def cost(replica: Replica) -> int:  # its statistics include all routers' requests, but are up to a second old
            return max(replica.client.stats.prompt_tokens, replica.prefill_cost) + length - cached[replica]

        suitable = [replica for replica in self._replicas if is_suitable(replica)]
        random.shuffle(suitable)
        return sorted(suitable, key=cost)

    def _loads(self) -> dict[Replica, int]:
        """Load of each replica: prompt tokens not computed yet, plus ``request_cost`` per open request."""
        return {
            one: self._request_cost * (one.num_other_requests + one.num_requests) + one.cost for one in self._replicas
        }

    def _room(self, replica: Replica) -> float:
        """Number of tokens for which a replica has free KV blocks, minus the prompt tokens of requests that have not
        started; infinity without statistics."""
        engine, stats = replica.client.engine, replica.client.stats
        if engine is None or not stats.blocks:  # the engine has sent no statistics yet
            return float("inf")
        return (stats.blocks - stats.blocks_used) * engine.block_size - replica.unstarted_tokens


def _needs_hidden_states(request: EngineRequest) -> bool:
    """True if the request needs the model's output for every prompt token, not only the keys and values."""
    sampling = request.sampling
    return request.pooling is not None or sampling.prompt_logprobs is not None or sampling.return_context_logits
