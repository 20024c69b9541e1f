"""A client of an engine process: requests go out, each step's deltas come in, and a death is known at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from uuid import uuid4

import msgspec
import zmq

from penstock.core import Code, EngineRequest, Failure, PenstockError, TokenDelta, Vocabulary

from . import wire
from .heartbeat import Heartbeat

logger = logging.getLogger(__name__)

AT_ONCE = 0.004
"""Seconds that reading what has come may take before others have their turn."""
LAST_WORDS = 0.05
"""Seconds to wait for what an engine sent before it ended."""
STARTING = Failure(Code.UNAVAILABLE, "the engine is starting; try again soon")
STOPPING = Failure(Code.UNAVAILABLE, "the server is stopping")
UNHEALTHY = 0.25
"""Share of ``engine_iteration_timeout`` after which an engine that does not answer takes no requests."""
LOST = Failure(Code.UNAVAILABLE, "the engine died; it is being started again")


class EngineClient:
    """Speaks to the engine at an address: to whichever process serves there, one after the other.

    To be used from one event loop only; nothing here waits but ``ready``.

    Args:
        deliver: called with each step's deltas for this client.
        lost: called with the reason when the engine is gone: every open request has ended with it.
        vocabulary: called when an engine has to know what tokens spell.
        cancel: called when requests that clients call so are to be aborted, if they came through here.
    """

    def __init__(
        self,
        address: str,
        deliver: Callable[[list[TokenDelta]], None],
        lost: Callable[[Failure], None],
        vocabulary: Callable[[], Vocabulary],
        cancel: Callable[[list[str]], None],
    ) -> None:
        self._address = address
        self._deliver = deliver
        self._lost = lost
        self._vocabulary = vocabulary
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._failure = STARTING
        self.engine: wire.Ready | None = None
        """The engine that serves now; None while there is none."""
        self._stats = wire.Stats()
        self.adapters: dict[str, str] = {}
        """Folders of the adapters that requests may name, by name. An engine that is started again gets them again."""
        self._met_one = False
        self._numbers = itertools.count(1)
        self._wanted: dict[int, asyncio.Future[None]] = {}
        self._found = asyncio.Event()
        self._over = self._closed = False
        self._heartbeat: Heartbeat | None = None
        self._connect()
        self._beat()
        self._stop_alive = threading.Event()
        self._alive = threading.Thread(target=self._say_alive, name="alive", daemon=True)
        self._alive.start()

    async def ready(self) -> wire.Ready:
        """Wait until an engine serves; raises ``PenstockError`` (``unavailable``) where none will any more."""
        while self.engine is None:
            if self._over:
                raise PenstockError.of(self._failure)
            await self._found.wait()
        return self.engine

    def check(self) -> wire.Ready:
        """The engine that serves; raises ``PenstockError`` (``unavailable``) where there is none, or it hangs."""
        if self.engine is None:
            raise PenstockError.of(self._failure)
        patience = UNHEALTHY * self.engine.iteration_timeout
        if patience and self._heartbeat and self._heartbeat.overdue > patience:
            words = f"the engine has not answered for {self._heartbeat.age:.0f} seconds"
            raise PenstockError(Code.UNAVAILABLE, words)
        return self.engine

    @property
    def stats(self) -> wire.Stats:
        """As the engine told last, at most some seconds ago where it answers; how long ago its loop came round."""
        age = self._heartbeat.age if self._heartbeat else 0.0
        return msgspec.structs.replace(self._stats, heartbeat_age=age)

    def add(self, request: EngineRequest) -> None:
        """Raises ``PenstockError`` (``unavailable``) where no engine is there to take it."""
        self.check()
        self._send(wire.Add(request))

    def abort(self, request_id: str) -> None:
        """Cancel a request; one that has ended, be it with its engine, is no matter."""
        if self._pidfd >= 0:  # also while no requests are taken any more
            self._send(wire.Abort(request_id))

    def stop(self, request_id: str, sequence: int) -> None:
        """End a sequence whose text has come to a stop string."""
        if self._pidfd >= 0:
            self._send(wire.Stop(request_id, sequence))

    def cancel(self, request_ids: list[str]) -> None:
        """Abort requests that their clients call so, whichever process they came to."""
        if self._pidfd >= 0:
            self._send(wire.Cancel(request_ids))

    async def reset_prefix_cache(self) -> None:
        """Returns once the engine has forgotten all cached prefixes."""
        number = next(self._numbers)
        await self._done(number, wire.ResetPrefixCache(number))

    def pause(self, request_id: str, paused: bool) -> None:
        """Have a request's sequences wait, or go on."""
        if self._pidfd >= 0:
            self._send(wire.Pause(request_id, paused))

    async def load_adapter(self, name: str, path: str) -> None:
        """Returns once requests may name it; raises ``PenstockError`` where it cannot be loaded."""
        number = next(self._numbers)
        await self._done(number, wire.LoadAdapter(number, name, path))

    async def unload_adapter(self, name: str) -> None:
        """No new request may name it; raises ``PenstockError`` (``not_found``) where it is not loaded."""
        number = next(self._numbers)
        await self._done(number, wire.UnloadAdapter(number, name))

    async def _done(self, number: int, message: wire.ToEngine) -> None:
        self.check()
        self._wanted[number] = self._loop.create_future()
        try:
            self._send(message)
            await self._wanted[number]
        finally:
            del self._wanted[number]

    def refuse(self, failure: Failure) -> None:
        """Take no requests any more, and end what is open."""
        self._over = True
        self._found.set()  # who waits for an engine is told
        self._lose(failure)

    async def close(self) -> None:
        await asyncio.sleep(LAST_WORDS)
        self._hear(all=True)
        self.refuse(STOPPING)
        self._closed = True
        self._next_beat.cancel()
        self._disconnect()
        self._stop_alive.set()
        self._alive.join()

    # --- One engine after the other ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._identity = uuid4().bytes
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.connect(self._address)
        self._loop.add_reader(self._socket.fileno(), self._hear)
        self._pidfd = -1

    def _disconnect(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._heartbeat:
            self._heartbeat.close()
            self._heartbeat = None
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _send(self, message: wire.ToEngine) -> None:
        self._socket.send(wire.encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self._hear)  # the socket's descriptor tells of changes only, and this may have hidden one

    def _say_alive(self) -> None:
        """In a thread, for as long as the event loop comes round now and then: work that holds it up for some seconds
        must not cost this process its requests."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        with socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for an engine that is not there
            socket.connect(self._address)
            while not self._stop_alive.wait(wire.BEAT):
                if time.monotonic() - self._looped < wire.LOOP_DEAD:
                    with contextlib.suppress(zmq.Again):
                        socket.send(wire.encode(wire.Alive(self._identity)), zmq.NOBLOCK)

    def _beat(self) -> None:
        self._looped = time.monotonic()
        self._next_beat = self._loop.call_later(wire.BEAT, self._beat)
        self._send(wire.Beat() if self.engine else wire.Hello())

    def _hear(self, all: bool = False) -> None:
        """Take in what has come; what takes too long goes on in the event loop's next iteration."""
        begun = time.monotonic()
        while not self._socket.closed:
            if not all and time.monotonic() - begun > AT_ONCE:
                self._loop.call_soon(self._hear)
                return
            try:
                heard = wire.decode_from_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match heard:
                case wire.Deltas(deltas):
                    self._deliver(deltas)
                case wire.Stats():
                    self._stats = heard
                case wire.Cancel(request_ids):
                    self._cancel(request_ids)
                case wire.Adapters(paths):
                    self.adapters = paths
                case wire.Done(number, failure):
                    if (wanted := self._wanted.get(number)) is not None and not wanted.done():
                        wanted.set_exception(PenstockError.of(failure)) if failure else wanted.set_result(None)
                case wire.Ready() if self._pidfd < 0 and not self._over:
                    self._meet(heard)

    def _meet(self, engine: wire.Ready) -> None:
        try:
            self._pidfd = os.pidfd_open(engine.pid)
        except ProcessLookupError:
            self._bury()
            return
        self._loop.add_reader(self._pidfd, self._mourn)
        self._heartbeat = Heartbeat(self._address)
        self.engine = engine
        self._send(wire.Learn(self._vocabulary()))  # before a request needs it: making it ready takes time
        if self._met_one:  # what the one before it was told at run time, this one does not know
            for name in engine.adapters.keys() - self.adapters.keys():
                self._send(wire.UnloadAdapter(0, name))
            for name, path in self.adapters.items():
                if name not in engine.adapters:
                    self._send(wire.LoadAdapter(0, name, path))
        else:
            self._met_one, self.adapters = True, engine.adapters
        self._found.set()

    def _mourn(self) -> None:
        """The engine's process has ended; what it said last may still be on its way."""
        self._loop.remove_reader(self._pidfd)
        self._loop.call_later(LAST_WORDS, self._bury)

    def _bury(self) -> None:
        if self._closed:
            return
        self._hear(all=True)
        self._disconnect()
        self._stats = wire.Stats()
        if not self._over:
            self._found.clear()
            self._lose(LOST)
        self._connect()
        self._send(wire.Hello())

    def _lose(self, failure: Failure) -> None:
        self._failure, self.engine = failure, None
        for wanted in self._wanted.values():
            if not wanted.done():
                wanted.set_exception(PenstockError.of(failure))
        self._lost(failure)
