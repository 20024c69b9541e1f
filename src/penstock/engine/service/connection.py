"""Connections to an engine process: on this host, with immediate detection of its death and hangs, or over TCP."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from uuid import uuid4

import zmq
from zmq.utils.monitor import parse_monitor_message

from . import messages
from .curve import secure_client
from .heartbeat import Heartbeat
from .step_record import StepRecord

HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT = 1.0, 8.0
"""Interval and timeout of ZeroMQ's heartbeats over TCP, seconds. After the timeout the connection is considered lost:
the other process was stopped, its host is down, or the network is cut."""
CONNECT_TIMEOUT = 5.0
"""Maximum duration of one attempt to connect over TCP, seconds."""
RECONNECT_MS, MAX_RECONNECT_MS = 100, 2000
"""Initial and maximum pause between attempts to connect over TCP, milliseconds. Each attempt doubles the pause."""
REFUSED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH


class EngineConnection(ABC):
    """A connection to the engine process at an address. Create and use it in one event loop.

    Args:
        address: ZeroMQ address.
        secret: the cluster secret, for TCP.
        on_readable: called when messages may have arrived.
        on_connected: called when a TCP connection is established. Messages sent before that are dropped.
        on_lost: called once when the engine is lost after ``confirm``.
        on_refused: called each time an engine refuses the connection.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        on_readable: Callable[[], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_refused = on_refused
        self.identity = uuid4().bytes
        """ZeroMQ identity, by which the engine knows this connection and its requests."""
        self.socket = open_socket(address, secret)
        self.socket.setsockopt(zmq.IDENTITY, self.identity)
        self.confirmed = False
        """True from the first answer of an engine until ``close``."""
        self._watch_connection()
        self.socket.connect(address)
        self._loop.add_reader(self.socket.fileno(), on_readable)

    @property
    def remote(self) -> bool:
        """True if the engine may be on another host, with another monotonic clock."""
        return is_remote(self._address)

    @property
    @abstractmethod
    def age(self) -> float:
        """Seconds since the engine's last heartbeat or message."""

    @property
    @abstractmethod
    def overdue(self) -> float:
        """Seconds by which the engine's next heartbeat or message is overdue; 0 if it is not due yet."""

    @property
    def stopped(self) -> float:
        """Seconds for which no thread of the engine process has run; 0 if unknown."""
        return 0.0

    def suspects(self) -> frozenset[int]:
        """``EngineRequest.uid`` of the requests in the fatal step of the engine, which has died; empty if unknown."""
        return frozenset()

    def confirm(self, engine: messages.Ready) -> None:
        """Start to monitor the engine that has answered. Raises ``ProcessLookupError`` if it has died already."""
        self.confirmed = True

    @abstractmethod
    def on_message(self, message: messages.FromEngine) -> None:
        """Handle the arrival of a message from the engine. Called for every message."""

    @abstractmethod
    def mark_lost(self) -> None:
        """Treat the engine as lost. Called when the engine has announced its end (``Stopped``)."""

    def close(self) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self.socket.fileno())
            self.socket.close()

    @abstractmethod
    def _watch_connection(self) -> None:
        """Start to monitor the connection. Called before the socket connects."""


class LocalConnection(EngineConnection):
    """A connection over a Unix socket to a process on this host. A pidfd reports the end of the process, and the
    ``Heartbeat`` shows hangs."""

    def _watch_connection(self) -> None:
        self._pidfd = -1
        self._heartbeat: Heartbeat | None = None
        self._step_record: StepRecord | None = None

    def suspects(self) -> frozenset[int]:
        return self._step_record.read(self._pid) if self._step_record else frozenset()

    @property
    def age(self) -> float:
        return self._heartbeat.age if self._heartbeat else 0.0

    @property
    def overdue(self) -> float:
        return self._heartbeat.overdue if self._heartbeat else 0.0

    @property
    def stopped(self) -> float:
        return self._heartbeat.stopped if self._heartbeat else 0.0

    def confirm(self, engine: messages.Ready) -> None:
        self._pidfd = os.pidfd_open(engine.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._pid = engine.pid
        self._heartbeat = Heartbeat(self._address)
        self._step_record = StepRecord(self._address)
        super().confirm(engine)

    def on_message(self, message: messages.FromEngine) -> None:
        """Do nothing: the heartbeat shows the engine's progress."""

    def mark_lost(self) -> None:
        """Do nothing: the pidfd reports the end of the process."""

    def close(self) -> None:
        self.confirmed = False
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._heartbeat:
            self._heartbeat.close()
            self._heartbeat = None
        if self._step_record:
            self._step_record.close()
            self._step_record = None
        super().close()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._on_lost()


class RemoteConnection(EngineConnection):
    """An encrypted TCP connection. The engine is lost when the connection is: ZeroMQ detects the end of the process at
    once, and a stopped or unreachable process within ``HEARTBEAT_TIMEOUT``. An engine whose loop hangs sends nothing,
    and is lost after ``engine_iteration_timeout``; its launcher kills it after the same time."""

    def _watch_connection(self) -> None:
        self._last_message = time.monotonic()
        self._expected = 0.0
        self._check: asyncio.TimerHandle | None = None
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | REFUSED
        self._events = self.socket.get_monitor_socket(events)
        self._loop.add_reader(self._events.fileno(), self._receive_events)
        self._loop.call_soon(self._receive_events)  # the edge-triggered descriptor may have missed the first events

    @property
    def age(self) -> float:
        return time.monotonic() - self._last_message

    @property
    def overdue(self) -> float:
        return max(self.age - self._expected - messages.KEEP_ALIVE_INTERVAL, 0.0)

    def confirm(self, engine: messages.Ready) -> None:
        super().confirm(engine)
        self._timeout = engine.iteration_timeout
        self._check = self._loop.call_later(messages.KEEP_ALIVE_INTERVAL, self._check_progress)

    def on_message(self, message: messages.FromEngine) -> None:
        self._last_message = time.monotonic()
        self._expected = message.expected if isinstance(message, messages.StepStarted) else 0.0

    def close(self) -> None:
        if self._check:
            self._check.cancel()
            self._check = None
        self.confirmed = False
        if not self._events.closed:
            self._loop.remove_reader(self._events.fileno())
            self.socket.disable_monitor()
            self._events.close()
        super().close()

    def _receive_events(self) -> None:
        while not self._events.closed:
            try:
                parts = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(parts)["event"]
            if event & REFUSED:
                self._on_refused()
            elif event == zmq.Event.DISCONNECTED:
                self.mark_lost()
            else:
                self._on_connected()

    def _check_progress(self) -> None:
        if self._timeout and self.overdue > self._timeout:
            self.mark_lost()
        else:
            self._check = self._loop.call_later(messages.KEEP_ALIVE_INTERVAL, self._check_progress)

    def mark_lost(self) -> None:
        if self._check:  # the connection is confirmed and not lost yet
            self._check.cancel()
            self._check = None
            self._on_lost()


def is_remote(address: str) -> bool:
    """True if a ZeroMQ address is a TCP address."""
    return address.startswith("tcp://")


def open_socket(address: str, secret: bytes) -> zmq.Socket[bytes]:
    """Create a socket for a client of the engine at ``address``. The caller connects it."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    if is_remote(address):
        secure_client(socket, secret)
        set_heartbeats(socket)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages while the socket is not connected
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_TIMEOUT * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        socket.setsockopt(zmq.IPV6, 1)
    return socket


def set_heartbeats(socket: zmq.Socket[bytes]) -> None:
    """Make ZeroMQ detect a lost connection within ``HEARTBEAT_TIMEOUT``."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_INTERVAL * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT * 1000))
