"""The data-parallel replicas of a model's engine behind the face of one: which replica computes a request, and what
becomes of it where that replica dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from zlib import crc32

from penstock.core import EngineRequest, Failure, PenstockError, TokenDelta, Vocabulary

from . import messages
from .client import EngineClient
from .prefix_index import PrefixIndex


class _OpenRequest:
    """A request that has not ended.

    Args:
        cost: tokens of its prompt that its replica has to compute.
    """

    __slots__ = ("cost", "output", "replica", "request")

    def __init__(self, request: EngineRequest, replica: int, cost: int) -> None:
        self.request = request
        self.replica = replica
        self.cost = cost
        """0 once its first token has come."""
        self.output: list[int] = []
        """Tokens of its first sequence."""


class EnginePool:
    """Sends requests to one of several engine processes with the same model. Create and use it in one event loop.

    A request goes to the replica with the least cost, in tokens: those of its prompt that no cached prefix saves,
    those of prompts that the replica has still to compute, and ``request_cost`` for each of its open requests. So a
    request follows its longest prefix unless the queue there is longer by more than what the prefix saves. What is
    cached is estimated from what this process has sent (``PrefixIndex``). Requests with an ``external_id``, which
    must be unique among those of all processes, go to the replica that its checksum says.

    Args:
        addresses: ZeroMQ addresses, one for each replica.
        on_deltas: called with deltas of this pool's requests.
        on_lost: called with the reason and the requests that are lost when an engine is gone. Those of which no token
            had come run again on another replica, if there is one.
        get_vocabulary, on_cancel: as of ``EngineClient``.
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
        self._others = [0] * len(addresses)
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
        """Name → folder of the LoRA adapters."""
        return next((client.adapters for client in self._clients if client.engine), self._clients[0].adapters)

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
        """Cancel requests by their external ids, in all clients of the engines: any engine forwards it to all."""
        if (client := next((client for client in self._clients if client.engine), None)) is not None:
            client.cancel(request_ids)

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes of the engines that work."""
        if self._prefixes:
            self._prefixes.clear()
        await asyncio.gather(*(self._clients[replica].reset_prefix_cache() for replica in self._working()))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into every engine; returns once requests may name it. Raises ``PenstockError`` where one
        cannot load it; the others unload it then."""
        working = [self._clients[replica] for replica in self._working()]
        results = await asyncio.gather(*(one.load_adapter(name, path) for one in working), return_exceptions=True)
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            loaded = [one for one, result in zip(working, results, strict=True) if result is None]
            await asyncio.gather(*(one.unload_adapter(name) for one in loaded), return_exceptions=True)
            raise error
        for client in self._clients:
            if client not in working:
                client.adapters = {**client.adapters, name: path}  # loaded when its engine is there again

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every engine. Raises as ``EngineClient.unload_adapter``."""
        working = [self._clients[replica] for replica in self._working()]
        for client in self._clients:
            if client not in working:
                client.adapters = {key: path for key, path in client.adapters.items() if key != name}
        await asyncio.gather(*(client.unload_adapter(name) for client in working))

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
        replica, cost = self._route(request)
        self._clients[replica].add(request)
        self._open[request.request_id] = _OpenRequest(request, replica, cost)

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

    def _route(self, request: EngineRequest) -> tuple[int, int]:
        """The replica for a request, and the tokens of its prompt that are to be computed there."""
        working, length = self._working(), len(request.prompt)
        if self._prefixes is None:
            return 0, length
        if request.adapter:
            working = [one for one in working if not self._clients[one].is_loading(request.adapter)] or working
        self._prefixes.set_capacity([client.engine for client in self._clients])
        cached = self._prefixes.cached_tokens(request)
        if request.external_id:
            replica = working[crc32(request.external_id.encode()) % len(working)]
        else:
            load = self._loads()
            replica = min(working, key=lambda replica: (load[replica] + length - cached[replica], load[replica]))
        self._prefixes.insert(request, [], replica)
        return replica, length - cached[replica]

    def _loads(self) -> list[int]:
        """Of each replica: tokens of prompts that it has still to compute, and ``request_cost`` for each request."""
        loads = [self._request_cost * count for count in self._others]
        for entry in self._open.values():
            loads[entry.replica] += self._request_cost + entry.cost
        return loads

    # --- From the replicas ------------------------------------------------------------------------------------------

    def _on_replica_deltas(self, replica: int, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if entry := self._open.get(delta.request_id):
                entry.cost = 0
                if delta.sequence == 0:
                    entry.output += delta.token_ids
        self._on_deltas(deltas)

    def _on_replica_stats(self, replica: int, stats: messages.Stats) -> None:
        own = sum(entry.replica == replica for entry in self._open.values())
        self._others[replica] = max(0, stats.running + stats.waiting - own)

    def _on_replica_lost(self, replica: int, failure: Failure) -> None:
        self._others[replica] = 0
        if self._prefixes:
            self._prefixes.forget(replica)
        lost = [name for name, entry in self._open.items() if entry.replica == replica]
        if not self._refusing:
            lost = [name for name in lost if not self._run_again(name)]
        self._on_lost(failure, lost)

    def _run_again(self, name: str) -> bool:
        """Send a request of which nothing has come to another replica. False where something has, or there is none."""
        entry = self._open[name]
        if not entry.cost:
            return False
        try:
            self.add(entry.request)
        except PenstockError:
            return False
        return True
