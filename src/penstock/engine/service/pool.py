"""The client of a model's engines: routes requests to them, and retries those of one that is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from zlib import crc32

import msgspec

from penstock.core import Code, EngineRequest, Failure, PenstockError, TokenDelta, Vocabulary

from . import messages
from .actions import EngineState, Inspect, LoadAdapter, ResetPrefixCache, Synchronize, UnloadAdapter
from .client import STOPPING, EngineClient
from .instance import Instance
from .prefix_index import PrefixIndex
from .replica import OpenRequest, Replica
from .snapshot import Snapshot

MAX_OVERDUE = 2.0
"""Seconds by which an engine's sign of progress may be overdue before others are preferred."""
INSPECT_TIMEOUT = 2.0
"""Seconds that an engine has to say what it is doing."""
NO_ENGINE = Failure(Code.UNAVAILABLE, "no instance that could answer is there; try again soon")


class EnginePool:
    """Sends requests to one of several engines with the same model: data-parallel replicas that this server has
    started, and instances on any host (``set_instances``). Create and use it in one event loop.

    A request goes to the replica with the least cost, in tokens: those of its prompt that no cached prefix saves, those
    of prompts that the replica has still to compute, those for which it has no KV blocks, and ``request_cost`` for each
    of its open requests. So a request follows its longest prefix unless the queue there is longer by more than what the
    prefix saves. What is cached is estimated from what this process has sent (``PrefixIndex``). Where the queue is
    full, another replica is tried. Of equal replicas any is chosen. Requests with an ``external_id``, which must be
    unique among those of all processes, go to the replica that its checksum says.

    Where prefill instances are there, a request of which the replica has ``min_prefill_tokens`` or more to compute
    names them, those first that have the least to compute.

    Args:
        addresses: ZeroMQ addresses of the engines that this server has started.
        on_deltas: called with deltas of this pool's requests, and the version of the weights of their engine.
        on_lost: called with the reason and the requests that are lost when an engine is gone. Those of which no token
            had come run again on another replica, if there is one.
        get_vocabulary, on_cancel, secret: as in ``EngineClient``.
        request_cost: the option ``data_parallel_request_cost``.
        min_prefill_tokens: the option ``pd_min_prefill_tokens``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        on_deltas: Callable[[list[TokenDelta], str], None],
        on_lost: Callable[[Failure, Collection[str]], None],
        get_vocabulary: Callable[[], Vocabulary],
        on_cancel: Callable[[list[str]], None],
        request_cost: int,
        min_prefill_tokens: int = 0,
        secret: bytes = b"",
    ) -> None:
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._get_vocabulary = get_vocabulary
        self._on_cancel = on_cancel
        self._request_cost = request_cost
        self._min_prefill_tokens = min_prefill_tokens
        self._secret = secret
        self._open: dict[str, OpenRequest] = {}
        self._refusing: Failure | None = None
        self._changed = asyncio.Event()
        """Set whenever an engine connects, and by ``stop_serving``."""
        self._closing: set[asyncio.Task[None]] = set()
        self._replicas: list[Replica] = []
        self._prefixes = PrefixIndex()
        for address in addresses:
            self._add(address)

    def set_instances(self, instances: Iterable[Instance]) -> None:
        """Use these instances. Others finish the requests that they have."""
        found = {f"tcp://{instance.address}": instance for instance in instances}
        for replica in self._replicas:
            if replica.instance is None:
                continue
            replica.leaving = replica.address not in found
            if not replica.leaving:
                replica.instance = found.pop(replica.address)
        self._remove_idle()
        for address, instance in found.items():
            self._add(address, instance)
        self._changed.set()

    def _add(self, address: str, instance: Instance | None = None) -> None:
        taken = {replica.number for replica in self._replicas}
        number = next(number for number in itertools.count() if number not in taken)
        client = EngineClient(
            address,
            lambda deltas: self._on_replica_deltas(replica, deltas),
            lambda failure: self._on_replica_lost(replica, failure),
            self._get_vocabulary,
            self._on_cancel,
            lambda stats: self._on_replica_stats(replica, stats),
            self._on_replica_adapters,
            lambda engine: self._on_replica_ready(replica, engine),
            self._secret,
        )
        replica = Replica(number, client, instance)
        if adapters := self.adapters:
            client.set_adapters(adapters)
        self._replicas.append(replica)

    def _remove_idle(self) -> None:
        """Disconnect from instances that are leaving and have no open request."""
        busy = {entry.replica for entry in self._open.values()}
        for replica in [one for one in self._replicas if one.leaving and one not in busy]:
            self._replicas.remove(replica)
            self._prefixes.forget(replica.number)
            task = asyncio.ensure_future(replica.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    # --- What all replicas have in common ---------------------------------------------------------------------------

    @property
    def reports(self) -> list[messages.Ready]:
        """The reports of the connected engines that this server has started."""
        return [one.client.engine for one in self._replicas if one.instance is None and one.client.engine]

    @property
    def engine(self) -> messages.Ready | None:
        """The report of the engines that are connected and compute answers, with what all of them can do; None while
        there is none."""
        return _common([one.engine for one in self._replicas if one.answers and one.engine])

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of the connected engines: several where their results may differ."""
        return sorted({one.engine.fingerprint for one in self._replicas if one.engine})

    @property
    def adapters(self) -> dict[str, str]:
        """Name → folder of the LoRA adapters that a connected engine has."""
        connected = [one.client for one in self._replicas if one.client.engine]
        connected = connected or [one.client for one in self._replicas[:1]]
        return {name: path for client in connected for name, path in client.adapters.items()}

    @property
    def states(self) -> list[EngineState]:
        """Of the connected engines that compute answers: their weights, and whether they sleep."""
        return [engine.state for one in self._replicas if one.answers and (engine := one.client.engine)]

    async def ready(self) -> messages.Ready:
        """Wait until an engine serves, and return its report. Raises as ``EngineClient.ready``."""
        while (engine := self.engine) is None:
            if self._refusing:
                raise PenstockError.of(self._refusing)
            self._changed.clear()
            await self._changed.wait()
        return engine

    async def synchronize(self) -> None:
        """Return once all that connected engines have told is known here."""
        clients = [one.client for one in self._replicas if one.client.engine]
        await asyncio.gather(*(client.call(Synchronize()) for client in clients), return_exceptions=True)

    def check_alive(self) -> None:
        """Raise ``PenstockError`` (``unavailable``) where no engine lives that computes answers, be it asleep."""
        if not any(state.asleep for state in self.states):
            self.require_engine()

    def require_engine(self) -> messages.Ready:
        """The report of the engines that work. Raises ``PenstockError`` (``unavailable``) where none does, or they
        sleep."""
        engine = _common([replica.require_engine() for replica in self._working()])
        assert engine
        return engine

    @property
    def stats(self) -> messages.Stats:
        """The engines' last statistics: sums, and the largest of times. ``replicas`` has each one's."""
        each = [self._stats_of(one) for one in self._replicas]
        if len(each) == 1 and self._replicas[0].instance is None:
            return each[0]
        answering = [stats for one, stats in zip(self._replicas, each, strict=True) if one.answers]
        return (
            msgspec.structs.replace(messages.Stats.total(answering), replicas=each) if answering else messages.Stats()
        )

    @property
    def instances_status(self) -> list[dict[str, Any]]:
        """What there is to tell of each instance: address, role, state, and its statistics by name."""
        result = []
        for one in self._replicas:
            if one.instance is None:
                continue
            try:
                one.require_engine()
                state = "ready"
            except PenstockError as error:
                state = "leaving" if one.leaving else error.failure.message
            stats = msgspec.to_builtins(self._stats_of(one))
            own = sum(one in (entry.replica, entry.prefill) for entry in self._open.values())
            result.append(
                {**stats, "address": one.instance.address, "role": one.instance.role, "state": state, "open": own}
            )
        return result

    @staticmethod
    def _stats_of(replica: Replica) -> messages.Stats:
        if replica.instance is None:
            return replica.client.stats
        return msgspec.structs.replace(
            replica.client.stats, address=replica.instance.address, role=replica.instance.role
        )

    async def inspect(self) -> list[tuple[messages.Stats, Snapshot | None]]:
        """Each engine's last statistics, and what it is doing; None where it does not say."""

        async def ask(replica: Replica) -> tuple[messages.Stats, Snapshot | None]:
            try:
                async with asyncio.timeout(INSPECT_TIMEOUT):
                    snapshot = await replica.client.call(Inspect())
            except (PenstockError, TimeoutError):
                return self._stats_of(replica), None
            return self._stats_of(replica), snapshot

        return await asyncio.gather(*(ask(replica) for replica in [*self._replicas]))

    def cancel(self, request_ids: list[str]) -> None:
        """Cancel requests by their external ids, in all clients of the engines: any engine forwards it to all, but one
        that hangs."""
        try:
            replicas = self._working()[:1]
        except PenstockError:
            replicas = self._replicas[:1]
        for replica in replicas:
            replica.client.tell(messages.Cancel(request_ids))

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes of the engines that work."""
        self._prefixes.clear()
        await asyncio.gather(*(replica.client.call(ResetPrefixCache()) for replica in self._connected(asleep=True)))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into every engine; returns once requests may name it. Raises ``PenstockError`` where one
        cannot load it; those that have loaded it unload it then."""
        working = [replica.client for replica in self._connected()]
        without = [client for client in working if client.adapters.get(name) != path]
        results = await asyncio.gather(*(one.call(LoadAdapter(name, path)) for one in working), return_exceptions=True)
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            loaded = [one for one, result in zip(working, results, strict=True) if result is None and one in without]
            await asyncio.gather(*(one.call(UnloadAdapter(name)) for one in loaded), return_exceptions=True)
            raise error
        for replica in self._replicas:
            if replica.client not in working:
                replica.client.set_adapters({**replica.client.adapters, name: path})

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every engine. Raises ``PenstockError`` (``not_found``) where it is not loaded."""
        working = [replica.client for replica in self._connected()]
        for client in [replica.client for replica in self._replicas]:
            if client not in working:
                client.set_adapters({key: path for key, path in client.adapters.items() if key != name})
        with_it = [client for client in working if name in client.adapters]
        await asyncio.gather(*(client.call(UnloadAdapter(name)) for client in with_it or working))

    def stop_serving(self, failure: Failure) -> None:
        """Fail open requests, and refuse new ones from now on, with ``failure``."""
        self._refusing = failure
        self._changed.set()
        for replica in self._replicas:
            replica.client.stop_serving(failure)

    async def close(self) -> None:
        """Fail open requests and disconnect."""
        self._refusing = self._refusing or STOPPING
        await asyncio.gather(*(replica.client.close() for replica in self._replicas), *self._closing)

    # --- Requests ---------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, full: frozenset[Replica] = frozenset()) -> None:
        """Send a request to a replica, which is none of ``full``. ``release`` must follow. Raises ``PenstockError``:
        ``unavailable`` as ``require_engine`` does, ``overloaded`` where no other works, as ``EngineClient.add``."""
        working = [replica for replica in self._working() if replica not in full]
        if not working:
            raise PenstockError(Code.OVERLOADED, "all queues are full")
        cached = self._cached_tokens(request)
        replica = self._route(request, working, cached)
        uncached = len(request.prompt) - cached[replica]
        prefills = self._prefill_instances(request, uncached, cached) if replica.takes_kv else []
        if self._routes:
            for one in [replica, *prefills[:1]]:
                self._prefixes.insert(request, [], one.number)
        addresses = tuple([one.kv_address for one in prefills])
        replica.client.add(msgspec.structs.replace(request, prefill=addresses) if addresses else request)
        self._open[request.request_id] = OpenRequest(request, replica, uncached, prefills, full)

    def release(self, request_id: str, abort: bool) -> None:
        """Forget a request. ``abort``: it has not ended, and the engine is told to end it."""
        if (entry := self._open.pop(request_id, None)) is None:
            return
        if abort:
            entry.replica.client.tell(messages.Abort(request_id))
        if self._routes:
            self._prefixes.insert(entry.request, entry.output, entry.replica.number)
        if entry.replica.leaving:
            self._remove_idle()

    def abort(self, request_id: str) -> None:
        """Cancel a request, which is then still to be released."""
        if entry := self._open.get(request_id):
            entry.settle()
            entry.replica.client.tell(messages.Abort(request_id))

    def finish_sequence(self, request_id: str, sequence: int) -> None:
        """End a sequence whose text contains a stop string."""
        if entry := self._open.get(request_id):
            entry.replica.client.tell(messages.FinishSequence(request_id, sequence))

    def pause(self, request_id: str, paused: bool) -> None:
        """Pause or resume a request's sequences."""
        if entry := self._open.get(request_id):
            entry.replica.client.tell(messages.Pause(request_id, paused))

    # --- Routing ----------------------------------------------------------------------------------------------------

    @property
    def _routes(self) -> bool:
        """Whether there are several replicas to choose from."""
        return len(self._replicas) > 1

    def _connected(self, asleep: bool = False) -> list[Replica]:
        """The replicas that accept requests, prefill instances included. Raises the error of the first where none
        does.

        Args:
            asleep: include those that sleep.
        """
        working, errors = [], list[PenstockError]()
        for replica in self._replicas:
            try:
                replica.require_engine(asleep)
                working.append(replica)
            except PenstockError as error:
                errors.append(error)
        if not working:
            raise errors[0] if errors else PenstockError.of(self._refusing or NO_ENGINE)
        return working

    def _working(self) -> list[Replica]:
        """The replicas that accept requests and answer them. Raises as ``_connected``."""
        working = [replica for replica in self._connected() if replica.answers]
        if not working:
            raise PenstockError.of(NO_ENGINE)
        return working

    def _cached_tokens(self, request: EngineRequest) -> dict[Replica, int]:
        """Leading tokens of a request's prompt that each replica has in its cache."""
        if not self._routes:
            return dict.fromkeys(self._replicas, 0)
        self._prefixes.set_capacity([replica.client.engine for replica in self._replicas])
        counts = self._prefixes.cached_tokens(request, max(replica.number for replica in self._replicas) + 1)
        return {replica: counts[replica.number] for replica in self._replicas}

    def _route(self, request: EngineRequest, working: list[Replica], cached: dict[Replica, int]) -> Replica:
        """The replica for a request, one of ``working``."""
        working = [one for one in working if one.has_adapter(request.adapter)] or working
        working = [one for one in working if one.client.overdue < MAX_OVERDUE] or working
        if request.external_id:  # the same one in all processes, whichever replicas come and go beside it
            return max(working, key=lambda replica: crc32(f"{request.external_id} {replica.address}".encode()))
        length, loads = len(request.prompt), self._loads()
        room = {replica: self._room(replica) for replica in working}

        def cost(replica: Replica) -> tuple[float, int]:
            return loads[replica] + length - cached[replica] + max(length - room[replica], 0), loads[replica]

        random.shuffle(working)  # other processes, which have not told of their requests yet, would choose the same
        return min(working, key=cost)

    def _prefill_instances(self, request: EngineRequest, uncached: int, cached: dict[Replica, int]) -> list[Replica]:
        """The prefill instances for a request of which its replica has ``uncached`` tokens to compute, the preferred
        one first; none where the replica had better compute its prompt itself."""
        if uncached < self._min_prefill_tokens or _needs_hidden_states(request):
            return []
        length = len(request.prompt)

        def can(replica: Replica) -> bool:
            if replica.answers or not replica.kv_address or not replica.has_adapter(request.adapter):
                return False
            try:
                return length <= replica.require_engine().max_model_len
            except PenstockError:
                return False

        own: dict[Replica, int] = {}
        for entry in self._open.values():
            if entry.prefill:
                own[entry.prefill] = own.get(entry.prefill, 0) + entry.prefill_cost

        def cost(replica: Replica) -> int:  # what it tells is of all routers, but up to a second old
            return max(replica.client.stats.prompt_tokens, own.get(replica, 0)) + length - cached[replica]

        able = [replica for replica in self._replicas if can(replica)]
        random.shuffle(able)
        return sorted(able, key=cost)

    def _loads(self) -> dict[Replica, int]:
        """Of each replica: tokens of prompts that it has still to compute, and ``request_cost`` for each request."""
        loads = {replica: self._request_cost * replica.num_other_requests for replica in self._replicas}
        for entry in self._open.values():
            loads[entry.replica] = loads.get(entry.replica, 0) + self._request_cost + entry.cost
        return loads

    def _room(self, replica: Replica) -> float:
        """Tokens for which a replica has KV blocks that no sequence holds, and no request that it has not begun will
        hold."""
        engine, stats = replica.client.engine, replica.client.stats
        if engine is None or not stats.blocks:  # it has not told yet
            return float("inf")
        begun = (stats.blocks - stats.blocks_used) * engine.block_size
        waiting = (entry for entry in self._open.values() if entry.replica is replica and entry.retriable)
        return begun - sum(len(entry.request.prompt) for entry in waiting)

    # --- From the replicas ------------------------------------------------------------------------------------------

    def _on_replica_deltas(self, replica: Replica, deltas: list[TokenDelta]) -> None:
        passed_on = []
        for delta in deltas:
            if entry := self._open.get(delta.request_id):
                if entry.replica is not replica or (_is_turned_away(delta) and self._retry(delta.request_id, replica)):
                    continue  # another replica computes it
                entry.settle()
                if self._routes and delta.sequence == 0:
                    entry.output += delta.token_ids
            passed_on.append(delta)
        self._on_deltas(passed_on, engine.state.weights_version if (engine := replica.client.engine) else "")

    def _on_replica_ready(self, replica: Replica, engine: messages.Ready) -> None:
        """It has connected, or changed its state."""
        if replica.weights_version != engine.weights_version:
            replica.weights_version = engine.weights_version
            self._prefixes.forget(replica.number)
        self._changed.set()

    def _on_replica_stats(self, replica: Replica, stats: messages.Stats) -> None:
        replica.num_other_requests = stats.requests_of_others

    def _on_replica_adapters(self, adapters: dict[str, str]) -> None:
        """Engines that are not there will have the same when they come."""
        for replica in self._replicas:
            if replica.client.engine is None:
                replica.client.set_adapters(adapters)

    def _on_replica_lost(self, replica: Replica, failure: Failure) -> None:
        replica.num_other_requests = 0
        self._prefixes.forget(replica.number)
        lost = [name for name, entry in self._open.items() if entry.replica is replica]
        if not self._refusing:
            lost = [name for name in lost if not self._retry(name)]
            for name in lost:
                del self._open[name]  # its cached prefix is gone, too
            self._remove_idle()
        self._on_lost(failure, lost)

    def _retry(self, name: str, full: Replica | None = None) -> bool:
        """Send a request of which nothing has come to another replica. False where something has, or there is none.

        Args:
            full: the replica that has turned it away.
        """
        entry = self._open[name]
        if not entry.retriable:
            return False
        try:
            self.add(entry.request, entry.full | {full} if full else entry.full)
        except PenstockError:
            return False
        return True


def _common(engines: list[messages.Ready]) -> messages.Ready | None:
    """The first report, with the shortest ``max_model_len`` of all; None where there is none."""
    if not engines:
        return None
    shortest = min(engine.max_model_len for engine in engines)
    first = engines[0]
    return first if first.max_model_len == shortest else msgspec.structs.replace(first, max_model_len=shortest)


def _needs_hidden_states(request: EngineRequest) -> bool:
    """Whether a request is answered with what the model computes for each token of its prompt, beside its KV."""
    sampling = request.sampling
    return request.pooling is not None or sampling.prompt_logprobs is not None or sampling.return_context_logits


def _is_turned_away(delta: TokenDelta) -> bool:
    """Whether a replica has refused the request as its queue is full, or it is stopping."""
    failure = delta.failure
    if failure is None:
        return False
    return failure == messages.ENGINE_STOPPING or (failure.code is Code.OVERLOADED and failure.field == "max_waiting")
