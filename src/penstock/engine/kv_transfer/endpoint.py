"""The thread that runs an engine's KV transfers, as sender, as receiver or as both, while the engine computes."""

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
PROGRESS_INTERVAL = 0.002
"""Seconds between two looks at the progress of a step that exports keys and values."""
OFFER_BYTES = 2**24
"""Bytes that are offered together."""
OFFERS_PER_STEP = 8
"""Number of times that layers of a step are offered while it is computed, at most."""


@dataclass
class _Step:
    """A step in flight that exports slots."""

    number: int
    exported: list[tuple[bytes, list[Exported]]]
    """Transfers, and their slots that are complete with this step."""
    offered: list[int]
    """Number of layers that were offered, of each pipeline stage."""


class Endpoint:
    """Runs transfers in a thread. Its methods may be called by any other one.

    Args:
        instance: of this engine.
        buffer: the engine's transfer buffer.
        stages: layers and world ranks of each pipeline stage.
        wake: called, in the thread, when ``take_events`` has something.

    Raises ``OSError`` where it cannot listen, and ``PenstockError`` where NIXL is missing.
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
        """Transfer → where it goes."""
        self._incoming: dict[bytes, ReceiverLink] = {}
        """Transfer → where it comes from."""
        self._peers: dict[str, tuple[ReceiverLink, asyncio.Task[Any]]] = {}
        """By address, with the task that runs it."""
        self._stages = stages
        self._steps: list[_Step] = []
        """Steps in flight that export something, the oldest first."""
        self._steps_changed = asyncio.Event()
        self._work: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        """What is to be done for decode engines."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.port = 0
        """TCP port that is listened at; 0 where there is none."""
        self._serving: set[asyncio.Task[Any]] = set()
        """Connections from decode engines."""
        self._listener: socket.socket | None = None
        if options.listen:
            self._listener = socket.create_server(split_address(options.listen, "kv_host"), backlog=128)
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def set_weights(self, version: str) -> None:
        """This engine's weights have changed: all transfers end, and connections are made anew, with engines that have
        the same ones."""
        self._call(self._set_weights, version)

    # --- For a decode engine ------------------------------------------------------------------------------------------

    def pull(self, address: str, pull: Pull) -> None:
        """Begin a transfer from the prefill engine at ``host:port``. ``Completed`` or ``Broken`` will follow."""
        self._call(self._pull, address, pull)

    def stop(self, transfer: bytes) -> None:
        """End a transfer that this engine pulls."""
        self._call(self._stop, transfer)

    def imported(self, arrived: list[Arrived]) -> None:
        """Pieces have been imported, or dropped: their places in the buffer are free."""
        self._call(self._imported, arrived)

    # --- For a prefill engine -----------------------------------------------------------------------------------------

    def offer(self, transfer: bytes, exported: list[Exported], first_layer: int, last_layer: int) -> None:
        """Offer layers of slots that this engine has exported."""
        offsets = self.buffer.layer_offsets
        few = max(1, OFFER_BYTES // (offsets[last_layer] - offsets[first_layer]))
        for begin in range(0, len(exported), few):
            self._do(self._offer, transfer, exported[begin : begin + few], first_layer, last_layer)

    def step_submitted(self, number: int, exported: list[tuple[bytes, list[Exported]]]) -> None:
        """A step was sent to the workers that exports slots of transfers. Their layers are offered as the workers'
        progress tells of them."""
        self._call(self._watch, _Step(number, exported, [0] * len(self._stages)))

    def step_done(self, number: int, failed: bool) -> None:
        """That step was computed, and all its layers are exported, or it has failed."""
        self._do(self._end_step, number, failed)

    def finish(self, transfer: bytes, num_cached: int) -> None:
        """All of a transfer has been offered; ``num_cached`` leading tokens were cached."""
        self._do(self._with_sender, transfer, lambda link: link.finish(transfer, num_cached))

    def fail(self, transfer: bytes, failure: Failure) -> None:
        """A transfer cannot be computed."""
        self._do(self._with_sender, transfer, lambda link: link.fail(transfer, failure))

    def close(self) -> None:
        """End all transfers and the thread."""
        self._call(self._loop.stop)
        self._thread.join()

    # --- In the thread ------------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(function, *args)

    def _do(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread, after those before it."""
        self._call(self._work.put_nowait, partial(function, *args))

    async def _work_off(self) -> None:
        """Do one thing after the other. What it has to send is sent before the next, so that the peer reads a piece
        while the checksum of the next one is computed."""
        while True:
            work = await self._work.get()
            try:
                work()
            except Exception:  # one transfer's; the others go on
                logger.exception("a KV transfer has failed")
            await asyncio.sleep(0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._listener:
            self._spawn(self._listen(self._listener))
            self._spawn(self._watch_steps())
            self._spawn(self._work_off())
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
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _watch(self, step: _Step) -> None:
        self._steps.append(step)
        self._steps_changed.set()

    async def _watch_steps(self) -> None:
        """Offer layers while steps that export them are computed."""
        while True:
            await self._steps_changed.wait()
            if not self._steps:
                self._steps_changed.clear()
                continue
            self._offer_layers(self._steps[0])
            await asyncio.sleep(PROGRESS_INTERVAL)

    def _offer_layers(self, step: _Step, done: bool = False) -> None:
        """Offer the layers that a step has exported since the last call; all others with ``done``."""
        few = max(1, self.buffer.num_layers // OFFERS_PER_STEP)
        for i, (layers, ranks) in enumerate(self._stages):
            if i and not step.offered[0]:
                return  # with the first layer the slots become the transfer's
            if done:
                count = len(layers)
            else:
                progress = [divmod(self._context.buffer.progress(rank), 1 << PROGRESS_BITS) for rank in ranks]
                count = min(layer if number == step.number else 0 for number, layer in progress)
            first = step.offered[i]
            if count > first and (done or count - first >= min(few, len(layers))):
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
        while True:
            try:
                connected, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # as where descriptors have run out
                logger.error("a KV transfer connection could not be accepted: %s", error.strerror)
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
        self._outgoing = {key: other for key, other in self._outgoing.items() if other.has(key)}
        self._outgoing.update(dict.fromkeys(transfers, link))

    def _report(self, events: list[Any]) -> None:
        if events:
            self._events.extend(events)
            events.clear()
            self._wake()

    def _pull(self, address: str, pull: Pull) -> None:
        self.stats.transfers += 1
        if address not in self._peers:
            for idle in [one for one, (link, _) in self._peers.items() if link.is_idle]:
                self._peers.pop(idle)[1].cancel()  # of an engine that may have started again, at another address
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
        if link := self._outgoing.get(transfer):
            act(link)
