"""The connection to a prefill engine: runs a ``Receiver`` over a socket, in an asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from penstock.config.addresses import split_address
from penstock.core import Code, Failure

from ..executor import node_link
from ..executor.node_link import SecretError
from .connection import Connection
from .link import PROTOCOL, TICK_INTERVAL, Context, Outbox
from .messages import Data, Hello, Read, Refused, Start, Status, Stop, Welcome
from .nixl import NixlPeer
from .receiver import Arrived, Broken, Completed, Job, Pull, Receiver
from .shared_memory import RemoteBuffer

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0
"""Maximum seconds to connect to a prefill engine."""
NIXL_INTERVAL, NIXL_IDLE_INTERVAL = 0.0005, 0.005
"""Seconds between two polls of NIXL: while reads are in progress, and while it is idle."""
REFUSAL_SECONDS = 5.0
"""Seconds after a refused or failed connection during which new transfers fail immediately. Each such transfer also
triggers another attempt to connect."""


class ReceiverLink:
    """The connection to a prefill engine. It is established when a transfer needs it, also after it was lost.

    Args:
        address: address of the prefill engine, ``host:port``.
    """

    def __init__(self, context: Context, address: str) -> None:
        self._context = context
        self._address = address
        self._name = f"the prefill instance {address}"
        self._receiver = self._new_receiver()
        self._waiting: list[Pull] = []
        """Transfers to start once connected."""
        self._wanted = asyncio.Event()
        """Set while a connection is needed."""
        self._welcomed = False
        """True if the prefill engine has accepted the last connection."""
        self._outbox: Outbox | None = None
        """Messages to send; None while not connected."""
        self._remote: RemoteBuffer | None = None
        """P's transfer buffer in shared memory; None with another transport."""
        self._nixl: NixlPeer[Job] | None = None
        """P's transfer buffer for NIXL; None with another transport."""
        self._refused_until = 0.0
        """Time until which new transfers fail, seconds on the monotonic clock."""
        self._refusal = ""
        """Error message of these transfers."""

    @property
    def is_idle(self) -> bool:
        """True if no connection exists or is needed."""
        return not self._wanted.is_set() and time.monotonic() >= self._refused_until

    def has(self, transfer: bytes) -> bool:
        """True if a transfer waits, runs, or still uses the buffer."""
        return self._receiver.has(transfer) or any(pull.start.transfer == transfer for pull in self._waiting)

    def pull(self, pull: Pull) -> None:
        """Start a transfer, after connecting if necessary."""
        now = time.monotonic()
        if now < self._refused_until:
            self._context.stats.failed += 1
            failure = Failure(Code.UNAVAILABLE, self._refusal)
            self._context.report([Broken(pull.start.transfer, failure)])
        elif self._outbox:
            self._receiver.start(pull, now)
            self._flush()
        else:
            self._waiting.append(pull)
        self._wanted.set()

    def stop(self, transfer: bytes) -> None:
        """End a transfer."""
        self._waiting = [pull for pull in self._waiting if pull.start.transfer != transfer]
        self._receiver.stop(transfer, time.monotonic())
        self._flush()

    def imported(self, arrived: Arrived) -> None:
        """Free the memory of a piece that the engine has imported or dropped."""
        self._receiver.imported(arrived, time.monotonic())
        self._flush()

    async def run(self) -> None:
        """Connect whenever a transfer needs a connection."""
        try:
            while True:
                await self._wanted.wait()
                self._welcomed = False
                reason = await self._serve()
                self._fail_all(reason, waiting=not self._welcomed)
                if not self._waiting:
                    self._wanted.clear()
        finally:
            self._fail_all("this instance is stopping")

    def _new_receiver(self) -> Receiver:
        context = self._context
        return Receiver(context.buffer, context.options.timeout, self._name)

    async def _serve(self) -> str:
        """Connect, and pull until the connection is lost. Returns an error message with the reason."""
        options = self._context.options
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                address = split_address(self._address, "prefill")
                link = await asyncio.to_thread(
                    node_link.connect, address, options.secret, PROTOCOL, CONNECT_TIMEOUT / 2
                )
                connection = Connection(link.socket)
        except SecretError as error:
            return self._refuse(f"{self._name} {error}")
        except OSError as error:  # a TimeoutError is an OSError
            return self._refuse(f"{self._name} cannot be reached: {error.strerror or str(error) or 'no answer'}")
        tasks: list[asyncio.Task[Any]] = []
        try:
            await connection.send(Hello(self._context.instance, options.allow_fingerprint_mismatch))
            async with asyncio.timeout(CONNECT_TIMEOUT):
                welcome = await connection.receive()
            if isinstance(welcome, Refused):
                return self._refuse(f"{self._name} has refused this instance: {welcome.reason}")
            if not isinstance(welcome, Welcome):
                return self._refuse(f"{self._name} is not a prefill instance")
            if options.transport == "auto" and welcome.memory:
                with contextlib.suppress(OSError, ValueError):
                    self._remote = RemoteBuffer(welcome.memory)
            if self._context.nixl:
                if welcome.nixl is None:
                    return self._refuse(f"{self._name} does not use NIXL: start both with --kv-transport nixl")
                self._nixl = self._context.nixl.connect(welcome.nixl)
            transport = "NIXL" if self._nixl else "shared memory" if self._remote else "TCP"
            logger.info("connected to %s: keys and values are transferred over %s", self._name, transport)
            self._refused_until = 0.0
            self._outbox = Outbox(connection)
            tasks += [
                asyncio.ensure_future(self._outbox.run()),
                asyncio.ensure_future(self._tick()),
                asyncio.ensure_future(self._receive(connection)),
            ]
            if self._nixl:
                tasks.append(asyncio.ensure_future(self._poll_nixl(self._nixl)))
            self._welcomed = True
            waiting, self._waiting = self._waiting, []
            for pull in waiting:
                self._receiver.start(pull, time.monotonic())
            self._flush()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            cause = next(iter(done)).exception()
            if not isinstance(cause, OSError):
                logger.error("the connection to %s has failed", self._name, exc_info=cause)
            return f"the connection to {self._name} is lost: {getattr(cause, 'strerror', None) or cause}"
        except OSError as error:
            return f"the connection to {self._name} is lost: {error.strerror or str(error) or 'no answer'}"
        finally:
            self._outbox = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._remote = None
            connection.close()
            if self._nixl:
                await self._drain(self._nixl)
                self._nixl = None

    def _refuse(self, reason: str) -> str:
        """Fail new transfers for ``REFUSAL_SECONDS``. Returns ``reason``."""
        now = time.monotonic()
        if now >= self._refused_until or reason != self._refusal:
            logger.error("%s", reason)
        self._refused_until, self._refusal = now + REFUSAL_SECONDS, reason
        return reason

    def _fail_all(self, reason: str, waiting: bool = True) -> None:
        """Fail all started transfers; with ``waiting``, also fail transfers that wait for a connection."""
        self._receiver.close(reason, time.monotonic())
        if waiting:
            failure = Failure(Code.UNAVAILABLE, reason)
            self._receiver.events += [Broken(pull.start.transfer, failure) for pull in self._waiting]
            self._waiting = []
        self._flush()

    async def _receive(self, connection: Connection) -> None:
        """Handle messages until the connection is lost."""
        receiver, now = self._receiver, time.monotonic
        while True:
            message = await connection.receive()
            if isinstance(message, Data):
                job = receiver.job_of(message)
                if job is None or not receiver.begin(job):
                    await connection.discard(message)
                    continue
                checksum = receiver.new_checksum(job)
                try:
                    await connection.receive_into(receiver.bytes_of(job), checksum)
                except BaseException:
                    receiver.unreadable(job, now())
                    raise
                receiver.verify(job, checksum.intdigest(), now())
            elif isinstance(message, Hello | Welcome | Refused | Start | Read | Status | Stop):
                name = type(message).__name__
                raise ConnectionError(f"it sent a message {name}, which a prefill instance must not send")
            else:
                receiver.receive(message, now())
            self._flush()

    async def _tick(self) -> None:
        """Check for overdue answers until the prefill engine stops answering."""
        while True:
            await asyncio.sleep(TICK_INTERVAL)
            answers = self._receiver.tick(time.monotonic())
            if not answers:
                self._outbox = None  # new transfers wait for the next connection
            self._flush()
            if not answers:
                raise ConnectionError("it does not answer")

    async def _poll_nixl(self, peer: NixlPeer[Job]) -> None:
        """Verify pieces as NIXL finishes reading them."""
        while True:
            await asyncio.sleep(NIXL_INTERVAL if peer.busy else NIXL_IDLE_INTERVAL)
            self._take_finished(peer)
            self._flush()

    async def _drain(self, peer: NixlPeer[Job]) -> None:
        """Wait until NIXL no longer writes to this engine's buffer: until then, the slots cannot be freed. The slots of
        a read that does not end are never freed."""
        self._receiver.close(f"the connection to {self._name} is lost", time.monotonic())
        deadline = time.monotonic() + self._context.options.timeout
        while peer.busy and time.monotonic() < deadline:
            self._take_finished(peer)
            await asyncio.sleep(NIXL_IDLE_INTERVAL)
        if peer.busy:
            logger.error(
                "NIXL reads from %s do not end; their slots of the transfer buffer are never freed", self._name
            )
        peer.close()

    def _take_finished(self, peer: NixlPeer[Job]) -> None:
        """Verify the pieces that NIXL has read."""
        receiver = self._receiver
        for job, read in peer.finished():
            if not read:
                receiver.unreadable(job, time.monotonic())
                continue
            if receiver.is_wanted(job):
                checksum = receiver.new_checksum(job)
                checksum.update(receiver.bytes_of(job))
                receiver.verify(job, checksum.intdigest(), time.monotonic())
            else:
                receiver.verify(job, 0, time.monotonic())

    def _read_by_nixl(self, peer: NixlPeer[Job], job: Job) -> None:
        """Start to read a piece with NIXL."""
        if not self._receiver.begin(job):
            return
        begin, size = self._context.buffer.layer_offsets[job.first_layer], len(self._receiver.bytes_of(job))
        try:
            peer.read(job, job.piece.slot, job.slot, begin, size)
        except OSError as error:
            logger.error("%s", error)
            self._receiver.unreadable(job, time.monotonic())

    def _flush(self) -> None:
        """Send the receiver's messages, read its jobs, and report its events."""
        receiver, stats = self._receiver, self._context.stats
        while receiver.jobs:
            jobs, receiver.jobs = receiver.jobs, []
            if self._nixl:
                for job in jobs:
                    self._read_by_nixl(self._nixl, job)
            elif self._remote is None:
                receiver.outgoing += [job.message for job in jobs]
            else:
                for job in jobs:
                    self._copy(self._remote, job)
        if self._outbox:
            self._outbox.put(receiver.outgoing)
        else:
            receiver.outgoing.clear()
        for event in receiver.events:
            if isinstance(event, Arrived):
                stats.bytes_received += event.size
            elif isinstance(event, Completed):
                stats.completed += 1
            else:
                stats.failed += 1
        stats.rereads += receiver.num_rereads
        stats.checksum_failures += receiver.num_checksum_failures
        receiver.num_rereads = receiver.num_checksum_failures = 0
        self._context.report(receiver.events)

    def _copy(self, remote: RemoteBuffer, job: Job) -> None:
        """Read a piece from P's shared memory."""
        receiver = self._receiver
        if not receiver.begin(job):
            return
        first_byte = self._context.buffer.layer_offsets[job.first_layer]
        checksum = receiver.new_checksum(job)
        if remote.read(job.piece.slot, job.piece.epoch, first_byte, receiver.bytes_of(job), checksum):
            receiver.verify(job, checksum.intdigest(), time.monotonic())
        else:
            receiver.unreadable(job, time.monotonic())
