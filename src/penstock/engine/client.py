"""The engine process as its clients see it: started, spoken to, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from penstock.core import Code, EngineRequest, Failure, PenstockError, TokenDelta
from penstock.core.options import EngineOptions

from . import wire

logger = logging.getLogger(__name__)

MOST_DEATHS, WITHIN = 3, 60.0
"""An engine that dies so often within so many seconds is not started again."""
LAST_WORDS_MS = 50
"""Milliseconds to wait for what an engine sent before it ended."""
TO_END = 10.0
"""Seconds beyond the time to drain after which an engine that does not end is killed."""
STOPPING = Failure(Code.UNAVAILABLE, "the engine is stopping")
LOST = Failure(Code.UNAVAILABLE, "the engine died; it is being started again")
GONE = Failure(Code.UNAVAILABLE, "the engine has died too often and is not started again")


class EngineClient:
    """Starts an engine process and hands its deltas on.

    Args:
        deliver: called with each step's deltas for this client.
        lost: called with the reason when the engine has died: every open request has ended with it.
    """

    def __init__(
        self,
        options: EngineOptions,
        deliver: Callable[[list[TokenDelta]], None],
        lost: Callable[[Failure], None],
    ) -> None:
        self._options = options
        self._deliver = deliver
        self._lost = lost
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._starts = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._running = False
        self.failure: Failure | None = None
        """Why there will be no engine any more."""

    async def start(self) -> wire.Ready:
        """Start the process and wait until its model has loaded.

        Raises ``PenstockError`` with the engine's own words where it cannot start.
        """
        try:
            ready = await self._launch()
        except BaseException:
            self._process.kill()
            self._socket.close(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._tasks = [asyncio.create_task(task()) for task in (self._watch, self._beat)]
        return ready

    async def add(self, request: EngineRequest) -> None:
        """Raises ``PenstockError`` (``unavailable``) where no engine is there to take it."""
        if self.failure or self._closing or not self._running:
            raise PenstockError.of(self.failure or (STOPPING if self._closing else LOST))
        await self._send(wire.Add(request))

    async def abort(self, request_id: str) -> None:
        """Cancel a request; one that has ended, be it with its engine, is no matter."""
        await self._send(wire.Abort(request_id))

    async def stop(self, request_id: str, sequence: int) -> None:
        """End a sequence whose text has come to a stop string."""
        await self._send(wire.Stop(request_id, sequence))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def close(self) -> int:
        """Stop the engine, which lets what runs come to its end; returns its exit status."""
        self._closing = True
        self._process.terminate()
        try:
            status = await asyncio.to_thread(self._process.wait, self._options.drain_timeout + TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = await asyncio.to_thread(self._process.wait)
        self._running = False
        for task in (*self._tasks, self._listener):
            task.cancel()
        await asyncio.gather(*self._tasks, self._listener, return_exceptions=True)
        while not self._socket.closed and await self._socket.poll(LAST_WORDS_MS):
            self._hear(await self._socket.recv())
        self._lost(STOPPING)
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        return status

    # --- One engine after the other ---------------------------------------------------------------------------------

    async def _launch(self) -> wire.Ready:
        self._starts += 1
        address = f"ipc://{self._folder}/{self._starts}"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.process", address], stdin=subprocess.PIPE, env=dict(os.environ)
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._options))
        self._process.stdin.close()
        await self._socket.send(wire.encode(wire.Hello()))
        while not await self._socket.poll(100):
            if self._process.poll() is not None:
                raise PenstockError(
                    Code.UNAVAILABLE, f"the engine ended with status {self._process.returncode} before it was ready"
                )
        answer = wire.decode_from_engine(await self._socket.recv())
        if isinstance(answer, wire.Broken):
            await asyncio.to_thread(self._process.wait)
            raise PenstockError.of(answer.failure)
        assert isinstance(answer, wire.Ready)
        self._listener = asyncio.create_task(self._listen())
        self._running = True
        return answer

    async def _send(self, message: wire.ToEngine) -> None:
        if self._running:
            await self._socket.send(wire.encode(message))

    async def _listen(self) -> None:
        while True:
            self._hear(await self._socket.recv())

    def _hear(self, message: bytes) -> None:
        heard = wire.decode_from_engine(message)
        if isinstance(heard, wire.Deltas):
            self._deliver(heard.deltas)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(wire.BEAT)
            await self._send(wire.Beat())

    async def _watch(self) -> None:
        """When the engine dies, fail what was open at once, then start another."""
        while True:
            status = await asyncio.to_thread(self._process.wait)
            if self._closing:
                return
            self._running = False
            self._listener.cancel()
            logger.error("the engine (process %d) ended with status %d", self._process.pid, status)
            self._lost(LOST)
            while not self._running:
                self._deaths.append(time.monotonic())
                self._socket.close(linger=0)
                if len(self._deaths) == MOST_DEATHS and self._deaths[-1] - self._deaths[0] < WITHIN:
                    self.failure = GONE
                    return
                try:
                    await self._launch()
                except Exception as error:
                    logger.error("the engine could not be started again: %s", error)
