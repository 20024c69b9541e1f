"""The connection from a decode engine: runs a ``Sender`` over a socket, in an asyncio event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from penstock.config.addresses import join_address
from penstock.core import Failure

from ..executor import node_link
from ..executor.node_link import NodeLink, SecretError
from .connection import Connection
from .link import PROTOCOL, TICK_INTERVAL, Context, Outbox
from .messages import Hello, Instance, Read, Refused, Start, Status, Stop, Welcome
from .sender import Exported, Sender
from .shared_memory import address_of

logger = logging.getLogger(__name__)


class SenderLink:
    """A connection from a decode engine."""

    def __init__(self, context: Context) -> None:
        self._context = context
        options = context.options
        self._sender = Sender(context.buffer, context.instance.weights_version, lease=options.timeout)
        self._outbox: Outbox | None = None
        self.on_transfers: Callable[[SenderLink, list[bytes]], None] = lambda link, transfers: None
        """Callback with this link and the ids of new transfers."""

    def has(self, transfer: bytes) -> bool:
        """True if the transfer has not ended."""
        return self._sender.has(transfer)

    async def serve(self, connected: socket.socket) -> None:
        """Serve the decode engine until the connection is lost."""
        peer = "an unknown address"
        try:
            peer = join_address(*connected.getpeername()[:2])
            link = await _authenticate(connected, self._context.options.secret)
        except (SecretError, OSError) as error:
            logger.warning("refused a KV transfer connection from %s: it %s", peer, str(error) or "does not answer")
            return
        connection = Connection(link.socket)
        tasks: list[asyncio.Task[Any]] = []
        try:
            if not await self._welcome(connection, peer):
                return
            self._outbox = Outbox(connection)
            tasks += [
                asyncio.ensure_future(self._outbox.run(self._sender, self._context)),
                asyncio.ensure_future(self._tick()),
                asyncio.ensure_future(self._receive(connection)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not isinstance(cause := task.exception(), OSError):
                    logger.error("a KV transfer connection has failed", exc_info=cause)
        except OSError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._outbox = None
            self._sender.close()
            self._context.report(self._sender.events)
            connection.close()

    def offer(self, transfer: bytes, exported: list[Exported], first_layer: int, last_layer: int) -> None:
        """Offer layers of exported slots (``Sender.offer``)."""
        self._sender.offer(transfer, exported, first_layer, last_layer, time.monotonic())
        self._flush()

    def finish(self, transfer: bytes, num_cached: int) -> None:
        """End a transfer after all its slots were offered."""
        self._sender.finish(transfer, num_cached, time.monotonic())
        self._flush()

    def fail(self, transfer: bytes, failure: Failure) -> None:
        """End a transfer that the engine cannot compute."""
        self._sender.fail(transfer, failure, time.monotonic())
        self._flush()

    async def _welcome(self, connection: Connection, peer: str) -> bool:
        """Receive ``Hello`` and reply. Returns False if the decode engine does not match this engine."""
        hello = await connection.receive()
        if not isinstance(hello, Hello):
            return False
        context = self._context
        allowed = hello.allow_fingerprint_mismatch and context.options.allow_fingerprint_mismatch
        if reason := mismatch(context.instance, hello.instance, allowed):
            logger.error("refused a decode instance at %s: %s", peer, reason)
            await connection.send(Refused(reason))
            return False
        memory = address_of(context.buffer) if context.options.transport == "auto" else None
        await connection.send(Welcome(context.instance, memory, context.nixl.address if context.nixl else None))
        return True

    async def _receive(self, connection: Connection) -> None:
        """Handle messages until the connection is lost."""
        while True:
            message = await connection.receive()
            if not isinstance(message, Start | Read | Status | Stop):
                name = type(message).__name__
                raise ConnectionError(f"it sent a message {name}, which a decode instance must not send")
            self._sender.receive(message, time.monotonic())
            self._flush()

    async def _tick(self) -> None:
        """Drop transfers with an expired lease until the decode engine stops reading."""
        while True:
            await asyncio.sleep(TICK_INTERVAL)
            reads = self._sender.expire(time.monotonic())
            self._flush()
            if not reads:
                raise ConnectionError("it does not read the pieces that it requested")

    def _flush(self) -> None:
        """Send the sender's messages and pieces, and report its events."""
        sender = self._sender
        if self._outbox:
            self._outbox.put(sender.outgoing)
            self._outbox.put(sender.sending)
        else:
            sender.outgoing.clear()
        if begun := [event.transfer for event in sender.events if isinstance(event, Start)]:
            self.on_transfers(self, begun)
        self._context.report(sender.events)


async def _authenticate(connected: socket.socket, secret: bytes) -> NodeLink:
    """Authenticate a peer like ``node_link.accept``, but in the event loop, so that a silent peer does not block other
    connections."""
    loop, link = asyncio.get_running_loop(), NodeLink(connected)
    try:
        challenge = node_link.send_challenge(link, PROTOCOL)
        async with asyncio.timeout(node_link.HANDSHAKE_TIMEOUT):
            while (taken := link.take()) is None:
                readable = loop.create_future()
                loop.add_reader(link.descriptor, readable.set_result, None)
                try:
                    await readable
                finally:
                    loop.remove_reader(link.descriptor)
                link.fetch()
        node_link.check_answer(link, challenge, taken[1], secret)
    except BaseException:
        link.close()
        raise
    return link


def mismatch(here: Instance, there: Instance, allow_fingerprint_mismatch: bool) -> str:
    """Reason why a decode engine (``there``) cannot use this engine's keys and values; empty if it can."""
    if (there.version, there.layout_version) != (here.version, here.layout_version):
        return f"it runs Penstock {there.version}, and the prefill instance {here.version}: install the same version"
    if there.weights_version != here.weights_version:
        weights = f"({there.weights_version}) than the prefill instance ({here.weights_version})"
        return f"it has other weights {weights}: start both with the same checkpoint"
    if there.layers != here.layers:
        message = "its KV cache has other layers, heads or dtypes than the prefill instance's"
        return f"{message} ({_describe(there)}, and {_describe(here)}): give both the same dtype and kv_cache_dtype"
    if there.states != here.states:
        return (
            f"its recurrent states have another layout than the prefill instance's ({_describe_states(there)}, and "
            f"{_describe_states(here)}): give both the same tensor_parallel_size, pipeline_parallel_size, "
            "pipeline_parallel_layers and dtype"
        )
    if there.fingerprint != here.fingerprint and not allow_fingerprint_mismatch:
        return (
            f"its kernels ({there.fingerprint}) are not bit-identical to the prefill instance's ({here.fingerprint}); "
            "to accept that, start both with --allow-fingerprint-mismatch"
        )
    return ""


def _describe_states(instance: Instance) -> str:
    if instance.states is None:
        return "none"
    ranks, ends, size = instance.states
    return f"{ranks} ranks, stages that end before layers {', '.join(map(str, ends))}, {size} bytes a rank"


def _describe(instance: Instance) -> str:
    """Shape and number format of an engine's KV cache, for an error message."""
    heads, vector_bytes, numbers = instance.layers[0]
    return f"{len(instance.layers)} layers of {heads} heads of {vector_bytes} bytes of {numbers}"
