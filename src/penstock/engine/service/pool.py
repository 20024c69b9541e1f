"""The client of a model's data-parallel engines: routes requests to replicas, and retries those of one that dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from zlib import crc32

from penstock.core import Code, EngineRequest, Failure, PenstockError, TokenDelta, Vocabulary

from . import messages
from .client import EngineClient
from .prefix_index import PrefixIndex


class _OpenRequest:
    """A request that has not ended.

    Args:
        cost: tokens of its prompt that its replica has to compute.
    """

    __slots__ = ("cost", "full", "output", "replica", "request")

    def __init__(self, request: EngineRequest, replica: int, cost: int, full: frozenset[int]) -> None:
        self.request = request
        self.replica = replica
        self.full = full
        """Replicas whose queues had no room for it."""
        self.cost = cost
        """0 once its first token has come, or it was aborted: it is not run again then."""
        self.output: list[int] = []
        """Tokens of its first sequence, where there are several replicas."""


class EnginePool:
    """Sends requests to one of several engine processes with the same model. Create and use it in one event loop.

    A request goes to the replica with the least cost, in tokens: those of its prompt that no cached prefix saves, those
    of prompts that the replica has still to compute, and ``request_cost`` for each of its open requests. So a request
    follows its longest prefix unless the queue there is longer by more than what the prefix saves. What is cached is
    estimated from what this process has sent (``PrefixIndex``). Where the queue is full, another replica is tried. Of
    equal replicas any is chosen. Requests with an ``external_id``, which must be unique among those of all processes,
    go to the replica that its checksum says.

    Args:
        addresses: ZeroMQ addresses, one for each replica.
        on_deltas: called with deltas of this pool's requests.
        on_lost: called with the reason and the requests that are lost when an engine is gone. Those of which no token
            had come run again on another replica, if there is one.
        get_vocabulary, on_cancel: as in ``EngineClient``.
        request_cost: the option ``data_parallel_request_cost``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        on_deltas: Callable[[list[TokenDelta]], None],
        on_lost: Callable[[Failure, Collection[str]], None],
        get_vocabulary: Callable[[], Vocabulary],
        on_cancel: Callable[[list[str]], None],
        request_cost: int,
    ) -> None:
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._request_cost = request_cost
        self._open: dict[str, _OpenRequest] = {}
        self._num_other_requests = [0] * len(addresses)
        """Requests that each replica had of other processes when it last told its statistics."""
        self._refusing = False
        self._clients = [
            EngineClient(
                address,
                partial(self._on_replica_deltas, replica),
                partial(self._on_replica_lost, replica),
                get_vocabulary,
                on_cancel,
                partial(self._on_replica_stats, replica),
                self._on_replica_adapters,
            )
            for replica, address in enumerate(addresses)
        ]
        self._prefixes = PrefixIndex(len(addresses)) if len(addresses) > 1 else None

    # --- What all replicas have in common ---------------------------------------------------------------------------

    @property
    def engine(self) -> messages.Ready | None:
        """A connected engine's report; None while there is none."""
        return next((client.engine for client in self._clients if client.engine), None)

    @property
    def adapters(self) -> dict[str, str]:
        """Name → folder of the LoRA adapters that a connected engine has."""
        connected = [client for client in self._clients if client.engine] or self._clients[:1]
        return {name: path for client in connected for name, path in client.adapters.items()}

    async def ready(self) -> messages.Ready:
        """Wait until an engine serves, and return its report. Raises as ``EngineClient.ready``."""
        waiting = [asyncio.ensure_future(client.ready()) for client in self._clients]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def require_engine(self) -> messages.Ready:
        """The report of an engine that works. Raises ``PenstockError`` (``unavailable``) where none does."""
        return self._clients[self._working()[0]].require_engine()

    @property
    def stats(self) -> messages.Stats:
        """The engines' last statistics: sums, and the largest of times. ``replicas`` has each one's."""
        each = [client.stats for client in self._clients]
        return each[0] if len(each) == 1 else messages.Stats.total(each)

    def cancel(self, request_ids: list[str]) -> None:
        """Cancel requests by their external ids, in all clients of the engines: any engine forwards it to all, but one
        that hangs."""
        try:
            replica = self._working()[0]
        except PenstockError:
            replica = 0
        self._clients[replica].cancel(request_ids)

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes of the engines that work."""
        if self._prefixes:
            self._prefixes.clear()
        await asyncio.gather(*(self._clients[replica].reset_prefix_cache() for replica in self._working()))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into every engine; returns once requests may name it. Raises ``PenstockError`` where one
        cannot load it; those that have loaded it unload it then."""
        working = [self._clients[replica] for replica in self._working()]
        without = [client for client in working if client.adapters.get(name) != path]
        results = await asyncio.gather(*(one.load_adapter(name, path) for one in working), return_exceptions=True)
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            loaded = [one for one, result in zip(working, results, strict=True) if result is None and one in without]
            await asyncio.gather(*(one.unload_adapter(name) for one in loaded), return_exceptions=True)
            raise error
        for client in self._clients:
            if client not in working:
                client.set_adapters({**client.adapters, name: path})

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every engine. Raises as ``EngineClient.unload_adapter``."""
        working = [self._clients[replica] for replica in self._working()]
        for client in self._clients:
            if client not in working:
                client.set_adapters({key: path for key, path in client.adapters.items() if key != name})
        with_it = [client for client in working if name in client.adapters]
        await asyncio.gather(*(client.unload_adapter(name) for client in with_it or working))

    def stop_serving(self, failure: Failure) -> None:
        """Fail open requests, and refuse new ones from now on, with ``failure``."""
        self._refusing = True
        for client in self._clients:
            client.stop_serving(failure)

    async def close(self) -> None:
        """Fail open requests and disconnect."""
        self._refusing = True
        await asyncio.gather(*(client.close() for client in self._clients))

    # --- Requests ---------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Send a request to a replica. ``release`` must follow. Raises ``PenstockError`` (``unavailable``) as
        ``require_engine`` does."""
        self._send(request)

    def release(self, request_id: str, cancel: bool) -> None:
        """Forget a request that has ended, or, with ``cancel``, cancel it."""
        if (entry := self._open.pop(request_id, None)) is None:
            return
        if cancel:
            self._clients[entry.replica].abort(request_id)
        if self._prefixes:
            self._prefixes.insert(entry.request, entry.output, entry.replica)

    def abort(self, request_id: str) -> None:
        """Cancel a request, which is then still to be released."""
        if entry := self._open.get(request_id):
            entry.cost = 0  # it is not run again
            self._clients[entry.replica].abort(request_id)

    def finish_sequence(self, request_id: str, sequence: int) -> None:
        """End a sequence whose text contains a stop string."""
        if entry := self._open.get(request_id):
            self._clients[entry.replica].finish_sequence(request_id, sequence)

    def pause(self, request_id: str, paused: bool) -> None:
        """Pause or resume a request's sequences."""
        if entry := self._open.get(request_id):
            self._clients[entry.replica].pause(request_id, paused)

    # --- Routing ----------------------------------------------------------------------------------------------------

    def _working(self) -> list[int]:
        """The replicas that accept requests. Raises the error of the first where none does."""
        working, errors = [], list[PenstockError]()
        for replica, client in enumerate(self._clients):
            try:
                client.require_engine()
                working.append(replica)
            except PenstockError as error:
                errors.append(error)
        if not working:
            raise errors[0]
        return working

    def _send(self, request: EngineRequest, full: frozenset[int] = frozenset()) -> None:
        """Send a request to a replica, which is none of ``full``. Raises as ``add``, and where no other works."""
        working = [replica for replica in self._working() if replica not in full]
        if not working:
            raise PenstockError(Code.OVERLOADED, "all queues are full")
        replica, cost = self._route(request, working)
        self._clients[replica].add(request)
        self._open[request.request_id] = _OpenRequest(request, replica, cost, full)

    def _route(self, request: EngineRequest, working: list[int]) -> tuple[int, int]:
        """The replica for a request, one of ``working``, and the tokens of its prompt that are to be computed there."""
        length = len(request.prompt)
        if self._prefixes is None:
            return 0, length
        if request.adapter:
            working = [one for one in working if self._has_adapter(one, request.adapter)] or working
        self._prefixes.set_capacity([client.engine for client in self._clients])
        cached = self._prefixes.cached_tokens(request)
        if request.external_id:
            checksum = crc32(request.external_id.encode())
            replica = min(working, key=lambda replica: (replica - checksum) % len(self._clients))
        else:
            load = self._loads()
            random.shuffle(working)  # other processes, which have not told of their requests yet, would choose the same
            replica = min(working, key=lambda replica: (load[replica] + length - cached[replica], load[replica]))
        self._prefixes.insert(request, [], replica)
        return replica, length - cached[replica]

    def _has_adapter(self, replica: int, name: str) -> bool:
        client = self._clients[replica]
        return name in client.adapters and not client.is_loading(name)

    def _loads(self) -> list[int]:
        """Of each replica: tokens of prompts that it has still to compute, and ``request_cost`` for each request."""
        loads = [self._request_cost * count for count in self._num_other_requests]
        for entry in self._open.values():
            loads[entry.replica] += self._request_cost + entry.cost
        return loads

    # --- From the replicas ------------------------------------------------------------------------------------------

    def _on_replica_deltas(self, replica: int, deltas: list[TokenDelta]) -> None:
        passed_on = []
        for delta in deltas:
            if entry := self._open.get(delta.request_id):
                if entry.replica != replica or (_queue_is_full(delta) and self._retry(delta.request_id, replica)):
                    continue  # another replica computes it
                entry.cost = 0
                if self._prefixes and delta.sequence == 0:
                    entry.output += delta.token_ids
            passed_on.append(delta)
        self._on_deltas(passed_on)

    def _on_replica_stats(self, replica: int, stats: messages.Stats) -> None:
        self._num_other_requests[replica] = stats.requests_of_others

    def _on_replica_adapters(self, adapters: dict[str, str]) -> None:
        """Engines that are not there will have the same when they come."""
        for client in self._clients:
            if client.engine is None:
                client.set_adapters(adapters)

    def _on_replica_lost(self, replica: int, failure: Failure) -> None:
        self._num_other_requests[replica] = 0
        if self._prefixes:
            self._prefixes.forget(replica)
        lost = [name for name, entry in self._open.items() if entry.replica == replica]
        if not self._refusing:
            lost = [name for name in lost if not self._retry(name)]
            for name in lost:
                del self._open[name]  # its cached prefix is gone, too
        self._on_lost(failure, lost)

    def _retry(self, name: str, full: int | None = None) -> bool:
        """Send a request of which nothing has come to another replica. False where something has, or there is none.

        Args:
            full: the replica whose queue has no room for it.
        """
        entry = self._open[name]
        if not entry.cost:
            return False
        try:
            self._send(entry.request, entry.full if full is None else entry.full | {full})
        except PenstockError:
            return False
        return True


def _queue_is_full(delta: TokenDelta) -> bool:
    """Whether a replica has refused the request as its queue is full."""
    failure = delta.failure
    return failure is not None and failure.code is Code.OVERLOADED and failure.field == "max_waiting"
