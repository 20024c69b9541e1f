"""The thread that runs an engine's KV transfers, as sender, receiver or both, while the engine computes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from penstock.checkpoint.kv_spec import PROGRESS_BITS
from penstock.config.addresses import split_address
from penstock.core import Failure

from .buffer import TransferBuffer
from .link import Context, Event, KVTransferOptions, TransferStats
from .messages import Instance
from .nixl import NixlAgent
from .receiver import Arrived, Pull
from .receiver_link import ReceiverLink
from .sender import Exported
from .sender_link import SenderLink

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""Maximum number of tasks (mainly connections); further connections are closed."""
PROGRESS_INTERVAL = 0.002
"""Seconds between two checks of the progress of a step that exports tokens."""
OFFER_BYTES = 2**24
"""Maximum total size of the pieces of one offer, bytes."""
OFFERS_PER_STEP = 8
"""Approximate maximum number of offers of a slot's layers during the computation of a step."""


@dataclass
class _Step:
    """A step in flight that exports slots."""

    number: int
    """``StepInput.export_step``."""
    exported: list[tuple[bytes, list[Exported]]]
    """Transfers, each with the slots completed by this step."""
    offered: list[int]
    """Number of layers offered so far, by pipeline stage."""


class Endpoint:
    """Runs transfers in a thread. Its methods may be called from any other thread.

    Args:
        instance: properties of this engine.
        buffer: transfer buffer of this engine.
        stages: layers and world ranks of each pipeline stage.
        wake: called in the thread when ``take_events`` has events.

    Raises ``OSError`` if it cannot listen, and ``PenstockError`` if NIXL is needed and cannot be used.
    """

    def __init__(
        self,
        instance: Instance,
        buffer: TransferBuffer,
        stages: list[tuple[range, list[int]]],
        options: KVTransferOptions,
        wake: Callable[[], None],
    ) -> None:
        self.stats = TransferStats()
        self.buffer = buffer
        self._context = Context(instance, buffer, options, self.stats, self._report)
        if options.transport == "nixl":
            self._context.nixl = NixlAgent(buffer)
        self._wake = wake
        self._events: deque[Event] = deque()
        self._outgoing: dict[bytes, SenderLink] = {}
        """Connection to the decode engine of each transfer."""
        self._incoming: dict[bytes, ReceiverLink] = {}
        """Connection to the prefill engine of each transfer."""
        self._peers: dict[str, tuple[ReceiverLink, asyncio.Task[Any]]] = {}
        """Connections to prefill engines by address, with the tasks that run them."""
        self._stages = stages
        self._steps: list[_Step] = []
        """Steps in flight that export tokens, oldest first."""
        self._steps_changed = asyncio.Event()
        """Set if ``_steps`` may have entries."""
        self._work: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        """Calls queued by ``_enqueue``."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """All tasks of the event loop, to cancel them at the end."""
        self.port = 0
        """TCP port for decode engines; 0 if the endpoint does not listen."""
        self._serving: set[asyncio.Task[Any]] = set()
        """Tasks that serve decode engines."""
        self._listener: socket.socket | None = None
        if options.listen:
            self._listener = socket.create_server(split_address(options.listen, "kv_host"), backlog=128)
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def take_events(self) -> list[Event]:
        """Remove and return the events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def set_weights(self, version: str) -> None:
        """Use another version of the weights: end all transfers and connections. The peers of new connections must have
        the same version."""
        self._call(self._set_weights, version)

    # --- For a decode engine ------------------------------------------------------------------------------------------

    def pull(self, address: str, pull: Pull) -> None:
        """Start a transfer from the prefill engine at ``address`` (``host:port``). The last event of the transfer is
        ``Completed`` or ``Broken``."""
        self._call(self._pull, address, pull)

    def stop(self, transfer: bytes) -> None:
        """End a transfer that this engine pulls."""
        self._call(self._stop, transfer)

    def imported(self, arrived: list[Arrived]) -> None:
        """Free the memory of pieces that were imported or dropped."""
        self._call(self._imported, arrived)

    # --- For a prefill engine -----------------------------------------------------------------------------------------

    def offer(self, transfer: bytes, exported: list[Exported], first_layer: int, last_layer: int) -> None:
        """Offer layers ``first_layer`` to ``last_layer`` (exclusive) of the exported slots."""
        offsets = self.buffer.layer_offsets
        count = max(1, OFFER_BYTES // (offsets[last_layer] - offsets[first_layer]))
        for begin in range(0, len(exported), count):
            self._enqueue(self._offer, transfer, exported[begin : begin + count], first_layer, last_layer)

    def step_submitted(self, number: int, exported: list[tuple[bytes, list[Exported]]]) -> None:
        """Offer the layers of ``exported`` slots as the workers compute them. Call this when step ``number`` was
        submitted."""
        self._call(self._watch, _Step(number, exported, [0] * len(self._stages)))

    def step_done(self, number: int, failed: bool) -> None:
        """Offer the remaining layers of a computed step, or release the slots of a failed step without offers."""
        self._enqueue(self._end_step, number, failed)

    def finish(self, transfer: bytes, num_cached: int) -> None:
        """End a transfer after all its slots were offered. The prefix cache had ``num_cached`` leading tokens."""
        self._enqueue(self._with_sender, transfer, lambda link: link.finish(transfer, num_cached))

    def fail(self, transfer: bytes, failure: Failure) -> None:
        """End a transfer that cannot be computed."""
        self._enqueue(self._with_sender, transfer, lambda link: link.fail(transfer, failure))

    def close(self) -> None:
        """End all transfers and the thread."""
        self._call(self._loop.stop)
        self._thread.join()

    # --- In the thread ------------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _enqueue(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread, after all functions that were queued earlier."""
        self._call(self._work.put_nowait, partial(function, *args))

    async def _run_queue(self) -> None:
        """Execute the queued calls in order. The messages of a call are sent before the next call, so that the peer
        reads a piece while the checksum of the next one is computed."""
        while True:
            work = await self._work.get()
            try:
                work()
            except Exception:  # other transfers continue
                logger.exception("a call of the KV transfer thread has failed")
            await asyncio.sleep(0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._listener:
            self._spawn(self._listen(self._listener))
            self._spawn(self._watch_steps())
            self._spawn(self._run_queue())
        try:
            self._loop.run_forever()
        finally:
            for task in list(self._tasks):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            if self._listener:
                self._listener.close()
            self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _watch(self, step: _Step) -> None:
        self._steps.append(step)
        self._steps_changed.set()

    async def _watch_steps(self) -> None:
        """Offer layers of exporting steps during their computation."""
        while True:
            await self._steps_changed.wait()
            if not self._steps:
                self._steps_changed.clear()
                continue
            self._offer_layers(self._steps[0])
            await asyncio.sleep(PROGRESS_INTERVAL)

    def _offer_layers(self, step: _Step, done: bool = False) -> None:
        """Offer the layers that a step has exported since the last call. With ``done``, offer all remaining layers."""
        min_layers = max(1, self.buffer.num_layers // OFFERS_PER_STEP)
        for i, (layers, ranks) in enumerate(self._stages):
            if i and not step.offered[0]:
                return  # layer 0 must be offered first, since its offer passes ownership of the slots
            if done:
                count = len(layers)
            else:
                progress = [divmod(self._context.buffer.progress(rank), 1 << PROGRESS_BITS) for rank in ranks]
                count = min(layer if number == step.number else 0 for number, layer in progress)
            first = step.offered[i]
            if count > first and (done or count - first >= min(min_layers, len(layers))):
                step.offered[i] = count
                for transfer, exported in step.exported:
                    if exported:
                        self._offer(transfer, exported, layers.start + first, layers.start + count)

    def _end_step(self, number: int, failed: bool) -> None:
        step = next(step for step in self._steps if step.number == number)
        self._steps.remove(step)
        if not failed:
            self._offer_layers(step, done=True)
        elif not step.offered[0]:
            for _, exported in step.exported:
                for each in exported:
                    self._context.buffer.release(each.slot)

    async def _listen(self, listener: socket.socket) -> None:
        """Accept connections of decode engines."""
        while True:
            try:
                connected, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # for example, the process has too many open files
                logger.error("cannot accept a KV transfer connection: %s", error.strerror)
                await asyncio.sleep(1)
                continue
            if len(self._tasks) > MAX_CONNECTIONS:
                connected.close()
                continue
            link = SenderLink(self._context)
            link.on_transfers = self._on_transfers
            task = self._spawn(link.serve(connected))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    def _on_transfers(self, link: SenderLink, transfers: list[bytes]) -> None:
        """Record the connection of new transfers, and forget ended transfers."""
        self._outgoing = {key: other for key, other in self._outgoing.items() if other.has(key)}
        self._outgoing.update(dict.fromkeys(transfers, link))

    def _report(self, events: list[Any]) -> None:
        """Queue events for ``take_events``, and clear the list."""
        if events:
            self._events.extend(events)
            events.clear()
            self._wake()

    def _pull(self, address: str, pull: Pull) -> None:
        self.stats.transfers += 1
        if address not in self._peers:
            for idle in [other for other, (link, _) in self._peers.items() if link.is_idle]:
                self._peers.pop(idle)[1].cancel()  # an idle engine may have restarted at another address
            link = ReceiverLink(self._context, address)
            self._peers[address] = link, self._spawn(link.run())
        link, _ = self._peers[address]
        self._incoming = {key: other for key, other in self._incoming.items() if other.has(key)}
        self._incoming[pull.start.transfer] = link
        link.pull(pull)

    def _set_weights(self, version: str) -> None:
        context = self._context
        context.instance = msgspec.structs.replace(context.instance, weights_version=version)
        self._outgoing.clear()
        for task in [*self._serving, *(task for _, task in self._peers.values())]:
            task.cancel()
        self._peers.clear()

    def _stop(self, transfer: bytes) -> None:
        if link := self._incoming.get(transfer):
            link.stop(transfer)

    def _imported(self, arrived: list[Arrived]) -> None:
        for each in arrived:
            if link := self._incoming.get(each.transfer):
                link.imported(each)

    def _offer(self, transfer: bytes, exported: list[Exported], first_layer: int, last_layer: int) -> None:
        if link := self._outgoing.get(transfer):
            link.offer(transfer, exported, first_layer, last_layer)
        else:
            for each in exported if first_layer == 0 else ():
                self._context.buffer.release(each.slot)

    def _with_sender(self, transfer: bytes, act: Callable[[SenderLink], None]) -> None:
        """Call ``act`` with the connection of a transfer; ignored if the transfer has ended."""
        if link := self._outgoing.get(transfer):
            act(link)
