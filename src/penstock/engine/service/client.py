"""The client of an engine process: sends requests, receives deltas, and detects the death of the process at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from penstock.core import Code, EngineRequest, Failure, PenstockError, TokenDelta, Vocabulary
from penstock.core.requests import ENCODE_ERRORS, invalid_request
from penstock.version import __version__

from . import messages
from .actions import EngineAction, EngineState, LoadAdapter, UnloadAdapter
from .connection import EngineConnection, LocalConnection, RemoteConnection, is_remote, open_socket
from .curve import MAX_FRAME, frames
from .snapshot import Snapshot

logger = logging.getLogger(__name__)

MAX_RECEIVE_TIME = 0.004
"""Maximum time for receiving messages in one iteration of the event loop, seconds."""
FLUSH_DELAY = 0.05
"""Time to wait for the last messages of a dead engine, seconds."""
STARTING = Failure(Code.UNAVAILABLE, "the engine is starting; try again soon")
STOPPING = Failure(Code.UNAVAILABLE, "the server is stopping; try again later")
UNHEALTHY_SHARE = 0.25
"""Fraction of ``engine_iteration_timeout`` by which the heartbeat may be overdue before new requests are refused."""
MAX_STOPPED = 3.0
"""Seconds for which an engine process may be stopped, for example by SIGSTOP, before new requests are refused."""
ENGINE_DIED = Failure(Code.UNAVAILABLE, "the engine died; it is being started again, try again soon")
ENGINE_RESTARTS = Failure(Code.UNAVAILABLE, "the engine has stopped; it is being started again, try again soon")


class EngineClient:
    """Sends requests to the engine process at an address. When the process dies or the connection is lost, the client
    connects to the next process at this address. Create and use the client in one event loop.

    Args:
        address: ZeroMQ address: ``ipc://…`` for a process on this host, ``tcp://…`` for a process on any host.
        on_deltas: called with the deltas of each step for this client's requests.
        on_lost: called with the reason when the engine and all its requests are lost.
        get_vocabulary: returns the model's vocabulary, which is sent to every new engine; None: send none.
        on_cancel: called with external ids of requests to abort, which may belong to other clients.
        on_stats: called with the engine's statistics every ``KEEP_ALIVE_INTERVAL``.
        on_adapters: called with the engine's adapters (name → folder) when it connects and when they change.
        on_ready: called with the engine's report when it connects and when its state changes.
        on_stopping: called when the engine begins to stop. It finishes its requests first.
        secret: the cluster secret, for TCP.
    """

    def __init__(
        self,
        address: str,
        on_deltas: Callable[[list[TokenDelta]], None],
        on_lost: Callable[[Failure], None],
        get_vocabulary: Callable[[], Vocabulary] | None,
        on_cancel: Callable[[list[str]], None],
        on_stats: Callable[[messages.Stats], None] = lambda stats: None,
        on_adapters: Callable[[dict[str, str]], None] = lambda adapters: None,
        on_ready: Callable[[messages.Ready], None] = lambda engine: None,
        on_stopping: Callable[[], None] = lambda: None,
        secret: bytes = b"",
    ) -> None:
        self.address = address
        self._secret = secret
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._get_vocabulary = get_vocabulary
        self._on_cancel = on_cancel
        self._on_stats = on_stats
        self._on_adapters = on_adapters
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._loop = asyncio.get_running_loop()
        self._unavailable = STARTING
        """Error of new requests while no engine is connected."""
        if is_remote(address):
            message = f"the engine at {self.name} has not answered yet; try again soon"
            self._unavailable = Failure(Code.UNAVAILABLE, message)
        self.engine: messages.Ready | None = None
        """Report of the connected engine; None if none is connected."""
        self.suspects = frozenset[int]()
        """Requests in the fatal step of the engine lost last (``EngineRequest.uid``); empty if unknown."""
        self._stats = messages.Stats()
        self.adapters: dict[str, str] = {}
        """Name → folder of the LoRA adapters. An engine that connects without them is told to load them."""
        self._reloads: dict[int, str] = {}
        """Names of the adapters being loaded after ``set_adapters``, by call id."""
        self._had_engine = False
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Snapshot | None]] = {}
        """Calls without a result yet, by id."""
        self._engine_changed = asyncio.Event()
        self._refusing = self._closed = self._stopping = False
        self._refused = ""
        """Reason why the last engine that answered cannot be used; empty if it can."""
        self._clock_offset: float | None = None
        """Estimated seconds by which this host's monotonic clock is ahead of the engine's."""
        self._connect()
        self._send_keep_alive()
        self._stop_keep_alive = threading.Event()
        self._keep_alive_thread = threading.Thread(target=self._keep_process_alive, name="keep-alive", daemon=True)
        self._keep_alive_thread.start()

    @property
    def name(self) -> str:
        """Host and port of an engine reached over TCP."""
        return self.address.removeprefix("tcp://")

    async def ready(self) -> messages.Ready:
        """Wait until an engine is connected, and return its report. Raises ``PenstockError`` (``unavailable``) after
        ``stop_serving``."""
        while self.engine is None:
            if self._refusing:
                raise PenstockError.of(self._unavailable)
            await self._engine_changed.wait()
        return self.engine

    def require_engine(self) -> messages.Ready:
        """Report of the connected engine. Raises ``PenstockError`` (``unavailable``) if no engine is connected, or if
        the engine hangs or is stopping."""
        if self.engine is None:
            raise PenstockError.of(self._unavailable)
        if self._stopping:
            raise PenstockError.of(messages.ENGINE_STOPPING)
        timeout = UNHEALTHY_SHARE * self.engine.iteration_timeout
        if timeout and self._connection.overdue > timeout:
            message = f"the engine has not answered for {self._connection.age:.0f} seconds; try again later"
            raise PenstockError(Code.UNAVAILABLE, message)
        if (stopped := self._connection.stopped) > MAX_STOPPED:
            message = f"the engine's process has not run for {stopped:.0f} seconds: was it stopped (SIGSTOP)?"
            raise PenstockError(Code.UNAVAILABLE, message)
        return self.engine

    @property
    def overdue(self) -> float:
        """Seconds by which the engine's next heartbeat or message is overdue."""
        return self._connection.overdue

    @property
    def stats(self) -> messages.Stats:
        """The last statistics of the engine, at most ``KEEP_ALIVE_INTERVAL`` old, with its current heartbeat age and
        state."""
        age = self._connection.age if self.engine else 0.0
        state = self.engine.state if self.engine else EngineState()
        return msgspec.structs.replace(self._stats, heartbeat_age=age, state=state)

    def is_loading(self, adapter: str) -> bool:
        """True if the connected engine is still loading this adapter after ``set_adapters``."""
        return adapter in self._reloads.values()

    def add(self, request: EngineRequest) -> None:
        """Send a request. Raises ``PenstockError``: ``unavailable`` (see ``require_engine``), or ``invalid`` for a
        value that cannot be encoded."""
        self.require_engine()
        time_left = None
        if self._connection.remote and request.deadline is not None:
            time_left = max(request.deadline - time.monotonic(), 0.0)
        try:
            self._send(messages.Add(request, time_left))
        except ENCODE_ERRORS as error:
            raise invalid_request(request, error) from error

    def notify(self, message: messages.ToEngine) -> None:
        """Send a message about open requests, also after ``stop_serving``. Does nothing without a connected engine."""
        if self._connection.confirmed:
            self._send(message)

    def set_adapters(self, adapters: dict[str, str]) -> None:
        """Make the engine load and unload LoRA adapters until it has exactly ``adapters`` (name → folder), without
        waiting. If no engine is connected, the next one does this when it connects."""
        known, self.adapters = self.adapters, adapters
        if self.engine is None:
            return
        for name in [name for name, path in known.items() if adapters.get(name) != path]:
            self._send(messages.Call(0, UnloadAdapter(name)))
        for name in [name for name, path in adapters.items() if known.get(name) != path]:
            call_id = next(self._call_ids)
            self._reloads[call_id] = name
            self._send(messages.Call(call_id, LoadAdapter(name, adapters[name])))

    async def call(self, action: EngineAction) -> Snapshot | None:
        """Execute an action in the engine, and return its result. Raises ``PenstockError`` if it fails."""
        self.require_engine()
        call_id = next(self._call_ids)
        self._calls[call_id] = self._loop.create_future()
        try:
            self._send(messages.Call(call_id, action))
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    def stop_serving(self, failure: Failure) -> None:
        """Fail open requests and refuse new requests with ``failure``."""
        self._refusing = True
        self._engine_changed.set()  # ``ready`` waits for this event
        self._fail_open_requests(failure)

    async def close(self) -> None:
        """Fail open requests and disconnect."""
        await asyncio.sleep(FLUSH_DELAY)
        self._receive(all=True)
        self.stop_serving(STOPPING)
        self._closed = True
        self._next_keep_alive.cancel()
        self._connection.close()
        self._stop_keep_alive.set()
        self._keep_alive_thread.join()

    # --- Connection --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        kind = RemoteConnection if is_remote(self.address) else LocalConnection
        self._connection: EngineConnection = kind(
            self.address,
            self._secret,
            self._receive,
            self._on_connected,
            self._on_connection_lost,
            self._on_refused,
        )
        self._socket = self._connection.socket

    def _send(self, message: messages.ToEngine) -> None:
        data = messages.encode(message)
        with contextlib.suppress(zmq.Again):  # the connection is lost; ``_on_connection_lost`` will handle that
            self._socket.send_multipart(frames(data) if len(data) > MAX_FRAME else [data], zmq.NOBLOCK)
        self._loop.call_soon(self._receive)  # sending may have consumed the edge of ZeroMQ's edge-triggered descriptor

    def _keep_process_alive(self) -> None:
        """Thread: send ``ProcessAlive``, so that the engine does not cancel this process's requests while the event
        loop is blocked for at most ``LOOP_TIMEOUT``."""
        with open_socket(self.address, self._secret) as socket:
            socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages while no engine is connected
            socket.connect(self.address)
            while not self._stop_keep_alive.wait(messages.KEEP_ALIVE_INTERVAL):
                if time.monotonic() - self._last_loop_time < messages.LOOP_TIMEOUT:
                    with contextlib.suppress(zmq.Again):
                        socket.send(messages.encode(messages.ProcessAlive(self._connection.identity)), zmq.NOBLOCK)

    def _send_keep_alive(self) -> None:
        self._last_loop_time = time.monotonic()
        self._next_keep_alive = self._loop.call_later(messages.KEEP_ALIVE_INTERVAL, self._send_keep_alive)
        self._send(messages.KeepAlive() if self.engine else messages.Connect())

    def _receive(self, all: bool = False) -> None:
        """Handle the messages that have arrived.

        Args:
            all: handle all messages, without the limit ``MAX_RECEIVE_TIME``.
        """
        started = time.monotonic()
        while not self._socket.closed:
            if not all and time.monotonic() - started > MAX_RECEIVE_TIME:
                self._loop.call_soon(self._receive)
                return
            try:
                message = messages.decode_from_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.MsgspecError as error:  # the engine runs another version of Penstock
                reason = f"the engine at {self.name} sent a message that Penstock {__version__} cannot decode ({error})"
                self._refuse(f"{reason}: install the same version on all hosts")
                continue
            self._connection.on_message(message)
            match message:
                case messages.Deltas(deltas):
                    self._on_deltas(self._with_local_times(deltas) if self._connection.remote else deltas)
                case messages.Stats():
                    offset = time.monotonic() - message.clock
                    self._clock_offset = offset if self._clock_offset is None else min(offset, self._clock_offset)
                    self._stats = message
                    self._on_stats(message)
                case EngineState() if self.engine:
                    self.engine = msgspec.structs.replace(self.engine, state=message)
                    self._on_ready(self.engine)
                case messages.Stopping():
                    self._stopping = True
                    self._on_stopping()
                case messages.Stopped():
                    self._send(messages.Disconnect())
                    self._connection.mark_lost()
                case messages.Cancel(request_ids):
                    self._on_cancel(request_ids)
                case messages.Adapters(paths):
                    loading = {name: self.adapters[name] for name in self._reloads.values() if name in self.adapters}
                    self.adapters = loading | paths
                    self._on_adapters(self.adapters)
                case messages.CallResult(call_id, failure, snapshot):
                    self._reloads.pop(call_id, None)
                    if (call := self._calls.get(call_id)) is not None and not call.done():
                        call.set_exception(PenstockError.of(failure)) if failure else call.set_result(snapshot)
                case messages.Ready() if not self._connection.confirmed and not self._refusing:
                    self._on_engine_ready(message)

    def _on_engine_ready(self, engine: messages.Ready) -> None:
        if engine.protocol != messages.PROTOCOL:
            found = f"the engine at {self.name} runs Penstock {engine.version or 'of another version'}"
            self._refuse(f"{found}, and this process {__version__}: install the same version on all hosts")
            return
        try:
            self._connection.confirm(engine)
        except ProcessLookupError:
            self._reconnect()
            return
        self.engine = engine
        self._refused = ""
        if self._get_vocabulary:  # sent early, as preparing it for the first guided request takes the engine seconds
            self._send(messages.SetVocabulary(self._get_vocabulary()))
        self._reloads.clear()
        # A restarted engine has loaded only the adapters of its options, so it lacks later changes.
        wanted = self.adapters if self._had_engine else engine.adapters | self.adapters
        self._had_engine, self.adapters = True, engine.adapters
        self.set_adapters(wanted)
        self._on_adapters(wanted)
        self._on_ready(engine)
        self._engine_changed.set()

    def _on_connected(self) -> None:
        if self.engine is None:
            self._send(messages.Connect())

    def _on_connection_lost(self) -> None:
        """Reconnect after ``FLUSH_DELAY``, as the engine's last messages may still arrive."""
        self._loop.call_later(FLUSH_DELAY, self._reconnect)

    def _on_refused(self) -> None:
        self._refuse(
            f"the engine at {self.name} refuses the connection: it has another cluster secret, or is not a Penstock "
            "engine; copy the secret's file of one host to all others"
        )

    def _refuse(self, reason: str) -> None:
        """Set the reason why the engine cannot be used as the error of new requests, and log it once."""
        if reason != self._refused and self.engine is None and not self._refusing:
            logger.warning(reason)
            self._refused, self._unavailable = reason, Failure(Code.UNAVAILABLE, reason)

    def _reconnect(self) -> None:
        """Fail the requests of the lost engine, and connect to the next one."""
        if self._closed:
            return
        self._receive(all=True)
        self.suspects = self._connection.suspects()
        self._connection.close()
        local = ENGINE_RESTARTS if self._stopping else ENGINE_DIED
        self._stats, self._clock_offset, self._stopping = messages.Stats(), None, False
        if not self._refusing:
            self._engine_changed.clear()
            lost = Failure(Code.UNAVAILABLE, f"the engine at {self.name} was lost; try again soon")
            self._fail_open_requests(lost if self._connection.remote else local)
        self._connect()
        self._send(messages.Connect())

    def _fail_open_requests(self, failure: Failure) -> None:
        self._unavailable, self.engine = failure, None
        for call in self._calls.values():
            if not call.done():
                call.set_exception(PenstockError.of(failure))
        self._on_lost(failure)

    def _with_local_times(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Return the deltas with their times converted from the engine's clock to this host's clock."""
        replace, offset = msgspec.structs.replace, self._clock_offset or 0.0
        return [
            replace(delta, perf=replace(perf, first_scheduled=perf.first_scheduled + offset))
            if (perf := delta.perf)
            else delta
            for delta in deltas
        ]
