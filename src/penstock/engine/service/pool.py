"""The client of a model's engines: routes requests, and sends requests of a lost engine to another engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from penstock.config.options import EngineOptions
from penstock.core import Code, EngineRequest, Failure, GeneratedSequence, PenstockError, TokenDelta, Vocabulary
from penstock.core.requests import ISOLATED_DEATHS

from . import messages
from .actions import EngineState, Inspect, LoadAdapter, ResetPrefixCache, Synchronize, UnloadAdapter
from .client import ENGINE_RESTARTS, STOPPING, EngineClient
from .instance import Instance
from .load_balancer import LoadBalancer
from .replica import OpenRequest, Replica
from .snapshot import Snapshot

logger = logging.getLogger(__name__)

INSPECT_TIMEOUT = 2.0
"""Maximum seconds to wait for an engine's snapshot."""
MAX_HOLD = 86_400.0
"""Maximum seconds that a request waits while requests are held."""
HELD = Failure(Code.UNAVAILABLE, "the model is being loaded, as it was unloaded while it was idle")
UNLOADED = ("kv_cache", "weights")
"""Freed parts of engines that were unloaded because they were idle."""
NO_ENGINE = Failure(Code.UNAVAILABLE, "no instance is available to answer; try again soon")


MOVED = "the engine that began the request was lost, and none that computes the same bits is available"
"""Reason why a request with output cannot continue."""


class ResumePolicy(NamedTuple):
    """How requests continue after their engine was lost."""

    timeout: float = 60.0
    """Maximum seconds to wait for another engine; 0: requests with output fail at once."""
    across_fingerprints: bool = False
    """Continue on an engine whose results may differ: other kernels or weights, or kernels that are not
    batch-invariant."""

    @classmethod
    def of(cls, options: EngineOptions) -> ResumePolicy:
        return cls(options.resume_timeout if options.resume else 0.0, options.resume_across_fingerprints)


RESUME = ResumePolicy()


class EnginePool:
    """Sends requests to one of several engines with the same model: data-parallel replicas started by this server, and
    instances on any host (``set_instances``). Create and use a pool in one event loop.

    ``LoadBalancer`` chooses the replica of a request. If its queue is full, another replica is tried.

    When an engine is lost, its requests continue on another one, from the output that has arrived: the same engine
    process started again, a replica, or another instance. Until one is available they wait, as new requests do.

    Args:
        addresses: ZeroMQ addresses of the engines started by this server.
        on_deltas: called with deltas of this pool's requests, and the version of their engine's weights.
        on_lost: called with a reason and the ids of requests that cannot continue.
        get_output: returns the output so far of each sequence of a request, by index.
        on_moved: called with the ids of requests that have lost their engine and continue, and the reason:
            ``engine_died``, ``engine_lost`` or ``engine_stopping``.
        on_changed: called with the id of a request before the first output of another engine whose results may differ,
            and the kernels and weights of that engine.
        resume: how requests continue.
        get_vocabulary: see ``EngineClient``.
        on_cancel: see ``EngineClient``.
        request_cost: the option ``data_parallel_request_cost``.
        min_prefill_tokens: the option ``pd_min_prefill_tokens``.
        secret: see ``EngineClient``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        on_deltas: Callable[[list[TokenDelta], str], None],
        on_lost: Callable[[Failure, Collection[str]], None],
        get_output: Callable[[str], Sequence[GeneratedSequence]],
        on_moved: Callable[[Collection[str], str], None],
        on_changed: Callable[[str, str], None],
        get_vocabulary: Callable[[], Vocabulary],
        on_cancel: Callable[[list[str]], None],
        request_cost: int,
        min_prefill_tokens: int = 0,
        secret: bytes = b"",
        resume: ResumePolicy = RESUME,
    ) -> None:
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._get_output = get_output
        self._on_moved = on_moved
        self._on_changed = on_changed
        self._resume = resume
        self._last_engine: messages.Ready | None = None
        """Last report returned by ``require_engine``."""
        self._lost_at = -math.inf
        """Time since which no engine is available, monotonic clock, as far as noticed."""
        self._get_vocabulary = get_vocabulary
        self._on_cancel = on_cancel
        self._secret = secret
        self._open: dict[str, OpenRequest] = {}
        self._counted: set[tuple[str, int]] = set()
        """Address and process id of the engines whose ``Ready.suspects`` were counted."""
        self._refusing: Failure | None = None
        self._is_held = False
        self.on_held: Callable[[], None] = lambda: None
        """Called when a request waits because requests are held, and when requests are held while one is open."""
        self.on_idle: Callable[[], None] | None = None
        """Called when the last open request has ended; None: nothing is called."""
        self._num_uses = 0
        """Number of operations that count as open requests (``use``)."""
        self._changed = asyncio.Event()
        """Set when an engine connects or the instances change, and by ``stop_serving``."""
        self._closing: set[asyncio.Task[None]] = set()
        self._replicas: list[Replica] = []
        self._balancer = LoadBalancer(self._replicas, request_cost, min_prefill_tokens)
        for address in addresses:
            self._add(address)

    def set_engines(self, addresses: Sequence[str]) -> bool:
        """Replace the engines started by this server. Returns True if there are new ones. An engine that is not in
        ``addresses`` any more is removed once its successor is connected. Its requests continue on the new engines;
        requests that cannot continue there finish on the old one."""
        local = [replica for replica in self._replicas if replica.instance is None and not replica.successor]
        known = {replica.address for replica in local}
        added = [address for address in addresses if address not in known]
        removed = [replica for replica in local if replica.address not in addresses]
        adapters = self.adapters
        for replica, address in zip(removed, added, strict=True):
            successor = self._add(address, position=self._replicas.index(replica), adapters=adapters)
            for each in self._replicas:  # a successor that is replaced before it has connected has a predecessor
                if each is replica or each.successor is replica:
                    each.successor = successor
        return bool(added)

    async def connected(self, timeout: float | None = None) -> None:
        """Wait until all engines started by this server are connected, for at most ``timeout`` seconds. Raises
        ``PenstockError`` (``unavailable``) after ``stop_serving``, and ``TimeoutError``."""
        clients = [replica.client for replica in self._replicas if replica.instance is None and not replica.successor]
        async with asyncio.timeout(timeout):
            await asyncio.gather(*(client.ready() for client in clients))

    def set_instances(self, instances: Iterable[Instance]) -> None:
        """Replace the instances. The requests of those not in ``instances`` continue on other ones, or finish where
        they are."""
        found = {f"tcp://{instance.address}": instance for instance in instances}
        for replica in self._replicas:
            if replica.instance is None:
                continue
            replica.leaving = replica.address not in found
            if not replica.leaving:
                replica.instance = found.pop(replica.address)
        for address, instance in found.items():
            self._add(address, instance)
        self._move_from_leaving()
        self._changed.set()

    @property
    def is_idle(self) -> bool:
        """True if no request of this process is open, and none of its operations runs (``use``)."""
        return not self._open and not self._num_uses

    @contextmanager
    def use(self) -> Iterator[None]:
        """Context of an operation that counts as an open request: the engines must not be unloaded."""
        self._num_uses += 1
        try:
            yield
        finally:
            self._num_uses -= 1
            self._report_idle()

    def _report_idle(self) -> None:
        if self.on_idle and self.is_idle:
            self.on_idle()

    @property
    def is_held(self) -> bool:
        """True if requests are held (``hold``)."""
        return self._is_held

    def hold(self, held: bool) -> None:
        """Hold new requests: they wait, without the resume timeout, while the engines are unloaded because they were
        idle. Meanwhile the last report of the engines counts as that of an available engine. False sends the held
        requests."""
        if held == self._is_held:
            return
        self._is_held, self._lost_at = held, math.inf
        if not held:
            self._continue_waiting()
        elif not self.is_idle or self._last_engine is None:
            self.on_held()

    def fail_held(self, failure: Failure) -> None:
        """Fail the waiting requests: the engines could not be loaded."""
        self._fail_waiting(failure)

    def _add(
        self,
        address: str,
        instance: Instance | None = None,
        position: int | None = None,
        adapters: dict[str, str] | None = None,
    ) -> Replica:
        """Connect to an engine.

        Args:
            position: position in the list of replicas; None: the end.
            adapters: the LoRA adapters that the engine must have; None: those of its options and of the other engines.
        """
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
            lambda: self._on_replica_stopping(replica),
            self._secret,
            adapters,
        )
        replica = Replica(number, client, instance)
        if adapters is None and (known := self.adapters):
            client.set_adapters(known)
        self._replicas.insert(len(self._replicas) if position is None else position, replica)
        return replica

    def _remove_idle(self) -> None:
        """Disconnect from engines that are leaving and have no open request."""
        for replica in [replica for replica in self._replicas if replica.leaving and not replica.num_requests]:
            self._replicas.remove(replica)
            self._balancer.forget(replica)
            task = asyncio.ensure_future(replica.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    # --- State of all replicas --------------------------------------------------------------------------------------

    @property
    def reports(self) -> list[messages.Ready]:
        """Reports of the connected engines started by this server."""
        started = [replica.client for replica in self._replicas if replica.instance is None and not replica.leaving]
        return [client.engine for client in started if client.engine]

    @property
    def engine(self) -> messages.Ready | None:
        """Report of the first connected engine that generates output, with the lowest ``max_model_len`` of these
        engines; None if no such engine is connected. While requests are held, the last report."""
        return self._last_engine if self._is_held else self._connected_engine

    @property
    def _connected_engine(self) -> messages.Ready | None:
        return _common([replica.engine for replica in self._generating if replica.engine])

    @property
    def fingerprints(self) -> list[str]:
        """Distinct fingerprints of the connected engines. Results may differ between fingerprints."""
        return sorted({one.engine.fingerprint for one in self._replicas if one.engine and not one.leaving})

    @property
    def adapters(self) -> dict[str, str]:
        """Name → folder of the LoRA adapters of the connected engines."""
        connected = [replica.client for replica in self._replicas if replica.client.engine]
        connected = connected or [replica.client for replica in self._replicas[:1]]
        return {name: path for client in connected for name, path in client.adapters.items()}

    @property
    def states(self) -> list[EngineState]:
        """States of the connected engines that generate output."""
        return [engine.state for replica in self._generating if (engine := replica.client.engine)]

    @property
    def _generating(self) -> list[Replica]:
        """Replicas that generate output, without those that are leaving."""
        return [replica for replica in self._replicas if replica.generates and not replica.leaving]

    async def ready(self) -> messages.Ready:
        """Wait until an engine is available, and return its report. Raises ``PenstockError`` (``unavailable``) after
        ``stop_serving``."""
        while (engine := self.engine) is None:
            if self._refusing:
                raise PenstockError.of(self._refusing)
            self._changed.clear()
            await self._changed.wait()
        return engine

    async def synchronize(self) -> None:
        """Wait until this process has handled all messages that the connected engines have sent so far."""
        clients = [replica.client for replica in self._replicas if replica.client.engine]
        await asyncio.gather(*(client.call(Synchronize()) for client in clients), return_exceptions=True)

    def check_alive(self) -> None:
        """Raise ``PenstockError`` (``unavailable``) if no engine that generates output is alive. A sleeping engine is
        alive."""
        if not any(state.asleep for state in self.states):
            self.require_engine()

    def require_engine(self) -> messages.Ready:
        """Report of the available engines (see ``engine``). Raises ``PenstockError`` (``unavailable``) if no engine is
        available, for example because all sleep. While requests are held, the last report."""
        if self._is_held and self._last_engine and not self._refusing:
            return self._last_engine
        engine = _common([replica.require_engine() for replica in self._available()])
        assert engine
        return engine

    def known_engine(self) -> messages.Ready:
        """Report of the available engines (see ``engine``). While they restart, their last report: new requests wait
        for them. Raises ``PenstockError`` as ``require_engine`` if none is expected within the resume timeout."""
        try:
            engine = self.require_engine()
        except PenstockError as error:
            if self._last_engine is None or not self._may_wait(error.failure):
                raise
            return self._last_engine
        self._last_engine, self._lost_at = engine, math.inf
        return engine

    @property
    def stats(self) -> messages.Stats:
        """Last statistics of the engines, combined by ``Stats.total``, with the statistics of each engine in
        ``replicas``."""
        if self._is_held:
            return messages.Stats(state=EngineState(asleep=UNLOADED))
        replicas = [replica for replica in self._replicas if not replica.leaving]
        each = [self._stats_of(replica) for replica in replicas]
        if len(each) == 1 and replicas[0].instance is None:
            return each[0]
        generating = [stats for replica, stats in zip(replicas, each, strict=True) if replica.generates]
        if not generating:
            return messages.Stats()
        return msgspec.structs.replace(messages.Stats.total(generating), replicas=each)

    @property
    def instances_status(self) -> list[dict[str, Any]]:
        """Address, role, state, number of this process's open requests, and statistics of each instance."""
        result = []
        for replica in self._replicas:
            if replica.instance is None:
                continue
            try:
                replica.require_engine()
                state = "ready"
            except PenstockError as error:
                state = "leaving" if replica.leaving else error.failure.message
            stats = msgspec.to_builtins(self._stats_of(replica))
            num_open = sum(replica in (entry.replica, entry.prefill) for entry in self._open.values())
            address, role = replica.instance.address, replica.instance.role
            result.append({**stats, "address": address, "role": role, "state": state, "open": num_open})
        return result

    @staticmethod
    def _stats_of(replica: Replica) -> messages.Stats:
        if replica.instance is None:
            return replica.client.stats
        return msgspec.structs.replace(
            replica.client.stats, address=replica.instance.address, role=replica.instance.role
        )

    async def inspect(self) -> list[tuple[messages.Stats, Snapshot | None]]:
        """Last statistics and a new snapshot of each engine. The snapshot is None if the engine does not answer."""

        async def inspect(replica: Replica) -> tuple[messages.Stats, Snapshot | None]:
            try:
                async with asyncio.timeout(INSPECT_TIMEOUT):
                    snapshot = await replica.client.call(Inspect())
            except (PenstockError, TimeoutError):
                return self._stats_of(replica), None
            return self._stats_of(replica), snapshot

        return await asyncio.gather(*(inspect(replica) for replica in [*self._replicas]))

    def cancel(self, request_ids: list[str]) -> None:
        """Cancel requests of any client by their external ids. Sends the message to one engine that is not hung, which
        forwards it to all clients."""
        try:
            replicas = self._available()[:1]
        except PenstockError:
            replicas = self._replicas[:1]
        for replica in replicas:
            replica.client.notify(messages.Cancel(request_ids))

    async def reset_prefix_cache(self) -> None:
        """Drop the cached prefixes of all connected engines."""
        self._balancer.clear()
        if self._is_held:
            return
        await asyncio.gather(*(replica.client.call(ResetPrefixCache()) for replica in self._connected(asleep=True)))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into every engine. Requests may use it afterwards. If an engine cannot load it, the other
        engines unload it, and ``PenstockError`` is raised."""
        clients = [replica.client for replica in self._connected()]
        new = [client for client in clients if client.adapters.get(name) != path]
        calls = [client.call(LoadAdapter(name, path)) for client in clients]
        results = await asyncio.gather(*calls, return_exceptions=True)
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            loaded = [client for client, result in zip(clients, results, strict=True) if result is None]
            unload = [client.call(UnloadAdapter(name)) for client in loaded if client in new]
            await asyncio.gather(*unload, return_exceptions=True)
            raise error
        for replica in self._replicas:
            if replica.client not in clients:
                replica.client.set_adapters({**replica.client.adapters, name: path})

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every engine. Raises ``PenstockError`` (``not_found``) if it is not loaded."""
        clients = [replica.client for replica in self._connected()]
        for replica in self._replicas:
            if (client := replica.client) not in clients:
                client.set_adapters({key: path for key, path in client.adapters.items() if key != name})
        loaded = [client for client in clients if name in client.adapters]
        await asyncio.gather(*(client.call(UnloadAdapter(name)) for client in loaded or clients))

    def stop_serving(self, failure: Failure) -> None:
        """Fail open requests and refuse new requests with ``failure``."""
        self._refusing = failure
        self._changed.set()
        for replica in self._replicas:
            replica.client.stop_serving(failure)
        self._fail_waiting(failure)

    async def close(self) -> None:
        """Fail open requests, and disconnect from all engines."""
        self._refusing = self._refusing or STOPPING
        self._fail_waiting(self._refusing)
        await asyncio.gather(*(replica.client.close() for replica in self._replicas), *self._closing)

    # --- Requests ---------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Send a request to a replica, or keep it until one is available. Call ``release`` when it has ended.

        Raises ``PenstockError``: ``unavailable`` as ``known_engine``, ``overloaded`` if ``max_waiting`` new requests
        wait for a replica, and as ``EngineClient.add``.
        """
        if request.sampling.seed is None and not request.sampling.greedy:  # the same on every engine
            sampling = request.sampling.replace(seed=random.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        request = msgspec.structs.replace(request, uid=random.getrandbits(64))
        entry = OpenRequest(request)
        try:
            self._assign(entry)
        except PenstockError as error:
            if not self._may_wait(error.failure):
                raise
            self._check_queue()
            self._wait(entry)
        self._open[request.request_id] = entry

    def release(self, request_id: str, abort: bool, output: list[int] | None = None) -> None:
        """Remove a request.

        Args:
            abort: it has not ended: abort it in the engine.
            output: tokens of its first sequence, for the prefix index.
        """
        if (entry := self._open.pop(request_id, None)) is None:
            return
        self._report_idle()
        entry.stop_waiting()
        replica = entry.replica
        entry.unassign()
        if replica is None:
            return
        if abort:
            replica.client.notify(messages.Abort(request_id))
        self._balancer.record(entry.request, output or [], replica)
        if replica.leaving:
            self._remove_idle()

    def abort(self, request_id: str) -> None:
        """Cancel a request. ``release`` must still be called."""
        if entry := self._open.get(request_id):
            entry.aborted = True
            entry.mark_started()
            entry.stop_waiting()
            entry.notify(messages.Abort(request_id))

    def finish_sequence(self, request_id: str, sequence: int) -> None:
        """End a sequence after a stop string was found in its text."""
        if entry := self._open.get(request_id):
            entry.notify(messages.FinishSequence(request_id, sequence))

    def pause(self, request_id: str, paused: bool) -> None:
        """Pause or resume a request's sequences."""
        if entry := self._open.get(request_id):
            entry.paused = paused
            entry.notify(messages.Pause(request_id, paused))

    def _assign(self, entry: OpenRequest) -> None:
        """Send a request to a replica, with its output so far. Raises ``PenstockError`` as ``add``."""
        if self._is_held:
            raise PenstockError.of(HELD)
        available = [replica for replica in self._available() if replica not in entry.full]
        if not available:
            raise PenstockError(
                Code.OVERLOADED, f"the queues of all {len(entry.full)} replicas are full; try again later"
            )
        request = entry.request
        name = request.adapter
        usable = not name or any(one.has_adapter(name) for one in available)
        if not usable and any(one.client.is_loading(name) for one in available):
            raise PenstockError(Code.UNAVAILABLE, f"adapter {name!r} is being loaded; try again soon", "adapter")
        if entry.engine:
            available = [replica for replica in available if self._can_continue(entry, replica)]
            if not available:
                raise PenstockError(Code.UNAVAILABLE, MOVED)
        if entry.started:
            output = tuple(self._get_output(request.request_id))
            if all(sequence.finished for sequence in output):
                entry.stop_waiting()  # nothing is left to compute
                return
            request = msgspec.structs.replace(request, resumed=output)
        if entry.deaths or entry.accepted:
            request = msgspec.structs.replace(request, deaths=entry.deaths, accepted=entry.accepted)
        replica, uncached, prefills = self._balancer.choose(request, available)
        addresses = tuple([replica.kv_address for replica in prefills])
        replica.client.add(msgspec.structs.replace(request, prefill=addresses) if addresses else request)
        entry.assign(replica, uncached, prefills)
        entry.changed = entry.engine is not None and not _same_bits(entry, replica)
        self._lost_at = math.inf
        if name and not entry.engine:
            entry.adapter_path = replica.client.adapters.get(name)
        if entry.paused:
            entry.notify(messages.Pause(request.request_id, True))

    # --- Waiting for an engine --------------------------------------------------------------------------------------

    def _may_wait(self, failure: Failure) -> bool:
        """True if a request that failed with ``failure`` may wait for an engine: one was lost less than the resume
        timeout ago."""
        if failure.code is not Code.UNAVAILABLE or failure == messages.ENGINE_ASLEEP or self._refusing:
            return False
        if self._is_held:
            return True
        now = time.monotonic()
        self._lost_at = min(self._lost_at, now)
        return self._last_engine is not None and now - self._lost_at < self._resume.timeout

    def _check_queue(self) -> None:
        """Raise ``PenstockError`` (``overloaded``) if ``max_waiting`` new requests wait for an engine."""
        if self._last_engine is None:  # requests are held since this process's start
            return
        count = sum(entry.waiting is not None and not entry.started for entry in self._open.values())
        if count >= (limit := self._last_engine.max_waiting):
            message = f"{count} requests wait for the engine, which {'is loading' if self._is_held else 'restarts'}"
            raise PenstockError(Code.OVERLOADED, message, "max_waiting", limit)

    def _wait(self, entry: OpenRequest) -> None:
        """Keep a request until an engine is available, for at most the resume timeout, or ``MAX_HOLD`` while requests
        are held."""
        timeout = MAX_HOLD if self._is_held else self._resume.timeout

        def fail() -> None:
            entry.waiting = None
            message = f"{MOVED if entry.engine else NO_ENGINE.message} (resume_timeout: {timeout:g} s)"
            self._fail([entry.request.request_id], Failure(Code.UNAVAILABLE, message))

        entry.unassign()
        if entry.waiting is None:
            entry.waiting = asyncio.get_running_loop().call_later(timeout, fail)
        if self._is_held:
            self.on_held()

    def _continue_waiting(self) -> None:
        """Send the waiting requests, in order of arrival, to engines that have become available."""
        waiting = [entry for entry in self._open.values() if entry.waiting]
        for entry in waiting:
            try:
                self._assign(entry)
            except PenstockError as error:
                if self._may_wait(error.failure):
                    continue
                self._fail([entry.request.request_id], error.failure)

    def _can_continue(self, entry: OpenRequest, replica: Replica) -> bool:
        """True if a replica may compute the rest of a request's output."""
        old, new, adapter = entry.engine, replica.engine, entry.request.adapter
        if old is None or new is None or (adapter and not replica.has_adapter(adapter)):
            return False
        if old.max_model_len != new.max_model_len:
            return False
        return self._resume.across_fingerprints or _same_bits(entry, replica)

    def _fail_waiting(self, failure: Failure) -> None:
        self._fail([name for name, entry in self._open.items() if entry.waiting], failure)

    def _fail(self, names: list[str], failure: Failure) -> None:
        """End requests that cannot continue."""
        for name in names:
            entry = self._open.pop(name)
            entry.stop_waiting()
            entry.unassign()
        if names:
            self._report_idle()
            self._on_lost(failure, names)

    # --- Available engines ------------------------------------------------------------------------------------------

    def _connected(self, asleep: bool = False) -> list[Replica]:
        """Replicas that accept requests, including prefill instances. If none does, raises the first replica's error.

        Args:
            asleep: include sleeping engines.
        """
        available, errors = [], list[PenstockError]()
        for replica in self._replicas:
            try:
                replica.require_engine(asleep)
                available.append(replica)
            except PenstockError as error:
                errors.append(error)
        if not available:
            raise errors[0] if errors else PenstockError.of(self._refusing or NO_ENGINE)
        return available

    def _available(self) -> list[Replica]:
        """Replicas that accept requests and generate output. Raises ``PenstockError`` if there are none."""
        available = [replica for replica in self._connected() if replica.generates]
        if not available:
            raise PenstockError.of(NO_ENGINE)
        return available

    # --- Callbacks of the replicas ----------------------------------------------------------------------------------

    def _on_replica_deltas(self, replica: Replica, deltas: list[TokenDelta]) -> None:
        forwarded, moved = [], []
        for delta in deltas:
            if entry := self._open.get(delta.request_id):
                if entry.replica is not replica:
                    continue  # the request runs on another replica now
                if (rejection := _rejection(delta)) and self._retry(entry, replica, rejection):
                    moved += [delta.request_id] * entry.started
                    continue
                entry.engine = replica.client.engine
                if entry.changed and entry.engine:
                    entry.changed = False
                    name = f"kernels {entry.engine.fingerprint}, weights {entry.engine.weights_version}"
                    self._on_changed(delta.request_id, name)
                if entry.unstarted_tokens:
                    entry.mark_started()
                if entry.deaths:
                    entry.record_survival(len(delta.token_ids))
                if not entry.started:
                    if delta.prompt_logprobs:
                        delta = entry.without_repeated(delta)
                    entry.started = bool(delta.token_ids or delta.finished)
            forwarded.append(delta)
        self._on_moved(moved, "engine_stopping")
        self._on_deltas(forwarded, engine.state.weights_version if (engine := replica.client.engine) else "")

    def _on_replica_ready(self, replica: Replica, engine: messages.Ready) -> None:
        """Called when an engine has connected, and when its state has changed."""
        if replica.instance and (process := (replica.address, engine.pid)) not in self._counted:
            self._counted.add(process)  # the suspects of a local engine are known when it dies
            self._count_deaths(frozenset(engine.suspects))
        if replica.weights_version != engine.weights_version:
            replica.weights_version = engine.weights_version
            self._balancer.forget(replica)
        self._changed.set()
        if (known := self._connected_engine) is not None:
            self._last_engine, self._lost_at = known, math.inf
        for each in self._replicas:
            each.leaving |= each.successor is replica
        self._continue_waiting()
        self._move_from_leaving()

    def _on_replica_stats(self, replica: Replica, stats: messages.Stats) -> None:
        replica.num_other_requests = stats.requests_of_others
        self._continue_waiting()  # an engine may have loaded an adapter, or answer again
        self._move_from_leaving()

    def _on_replica_adapters(self, adapters: dict[str, str]) -> None:
        """Called when an engine's adapters have changed. Engines that are not connected load them when they connect."""
        for replica in self._replicas:
            if replica.client.engine is None:
                replica.client.set_adapters(adapters)

    def _on_replica_lost(self, replica: Replica, failure: Failure) -> None:
        replica.num_other_requests = 0
        self._balancer.forget(replica)
        if self._refusing:
            self._on_lost(failure, [name for name, entry in self._open.items() if entry.replica is replica])
            return
        self._count_deaths(replica.client.suspects)
        lost = [name for name, entry in self._open.items() if entry.replica is replica]
        continued = {name for name in lost if self._retry(self._open[name])}
        failed = [name for name in lost if name not in continued]
        if lost:
            message = "%s: %d of its %d requests continue on another engine or wait for one"
            logger.warning(message, failure.message, len(continued), len(lost))
        reason = "engine_stopping" if failure == ENGINE_RESTARTS else "engine_died"
        self._on_moved(continued, reason if replica.instance is None else "engine_lost")
        self._fail(failed, failure)
        self._remove_idle()

    def _on_replica_stopping(self, replica: Replica) -> None:
        """Move the requests of an instance that is stopping. Engines of this server stop when their requests have
        ended, or as part of a restart."""
        if replica.instance is not None:
            self._move_from(replica)

    def _move_from_leaving(self) -> None:
        """Move the requests of engines that are leaving, and disconnect from those without requests."""
        for replica in self._replicas:
            if replica.leaving and replica.num_requests:
                self._move_from(replica)
        self._remove_idle()

    def _move_from(self, replica: Replica) -> None:
        """Move the requests of an engine to other engines, so that it need not wait for their end. Those that cannot
        continue elsewhere finish there."""
        if not self._resume.timeout:
            return
        moved = []
        for name, entry in self._open.items():
            if entry.replica is not replica or entry.aborted:
                continue
            entry.accepted = True
            with suppress(PenstockError):
                self._assign(entry)
                replica.client.notify(messages.Abort(name))
                moved.append(name)
        if moved:
            name = "the engine" if replica.instance is None else replica.client.name
            logger.info("%s is stopping: %d requests continue on other engines", name, len(moved))
        self._on_moved(moved, "engine_stopping")

    def _count_deaths(self, suspects: frozenset[int]) -> None:
        """Count the death of an engine for the requests of its fatal step. Fail the request that was computed alone
        because earlier engines had died in steps with it."""
        for name, entry in list(self._open.items()):
            if entry.request.uid in suspects:
                alone = len(suspects) == 1 and entry.sent_deaths >= ISOLATED_DEATHS
                entry.deaths += 1
                if alone:
                    entry.notify(messages.Abort(name))
                    message = (
                        f"{entry.deaths} engines died while they computed this request, the last one with no other"
                    )
                    self._fail([name], Failure(Code.INTERNAL, message))

    def _retry(self, entry: OpenRequest, full: Replica | None = None, rejection: Failure | None = None) -> bool:
        """Continue a request on another replica, or keep it until one is available. Returns False if it cannot
        continue.

        Args:
            full: replica that has rejected the request.
            rejection: reason of the rejection.
        """
        if entry.aborted or (entry.engine and not self._resume.timeout):
            return False
        if full:
            entry.full |= {full}
        else:
            entry.accepted = True
        try:
            self._assign(entry)
        except PenstockError as error:
            # A replica that is stopping rejects requests until it ends; they wait for the next one.
            stopping = rejection if rejection and rejection.code is Code.UNAVAILABLE else None
            is_replaced = full is not None and full.leaving and entry.engine is not None  # no next one, it is here
            if is_replaced or not self._may_wait(stopping or error.failure):
                return False
            entry.full = frozenset()
            self._wait(entry)
        return True


def _same_bits(entry: OpenRequest, replica: Replica) -> bool:
    """True if a replica computes the rest of a request's output with the same bits."""
    old, new, adapter = entry.engine, replica.engine, entry.request.adapter
    if old is None or new is None:
        return False
    same = (old.fingerprint, old.weights_version) == (new.fingerprint, new.weights_version)
    same_adapter = not adapter or replica.client.adapters.get(adapter) == entry.adapter_path
    return same and same_adapter and old.batch_invariant and new.batch_invariant


def _common(engines: list[messages.Ready]) -> messages.Ready | None:
    """The first report, with the lowest ``max_model_len`` of all reports; None without reports."""
    if not engines:
        return None
    shortest = min(engine.max_model_len for engine in engines)
    first = engines[0]
    return first if first.max_model_len == shortest else msgspec.structs.replace(first, max_model_len=shortest)


def _rejection(delta: TokenDelta) -> Failure | None:
    """Failure with which a replica has rejected the request because its queue is full or the engine is stopping."""
    failure = delta.failure
    if failure is None:
        return None
    full = failure.code is Code.OVERLOADED and failure.field == "max_waiting"
    return failure if full or failure in (messages.ENGINE_STOPPING, messages.ENGINE_STOPPED) else None
