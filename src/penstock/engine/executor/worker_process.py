"""The worker process, forked by a fork server for ``MultiprocExecutor``. It ends when the executor's process ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import numpy as np
import torch

from penstock.config import logs
from penstock.config.options import EngineOptions
from penstock.core import PenstockError
from penstock.ops.cores import cores_of_rank, usable_cores
from penstock.parallel import SINGLE_RANK, Group, PipelineStage
from penstock.parallel.link import SocketLink
from penstock.parallel.pipeline import Receiver, Sender

from ..exit_status import LINK_LOST
from ..step import LoadModel, StepInput, StepOutput, encoder
from ..worker.worker import Worker
from .layout import RankInfo, rendezvous_file
from .messages import Call, CallReply, Close, Failed, FromWorker, GrammarBitmask, Start, StepReply, ToWorker, to_worker
from .poller import PeerLostError, Poller
from .ring import Reader, Writer

logger = logging.getLogger(__name__)


class WorkerProcess:
    """Receives messages from an executor, and executes them in order."""

    def __init__(self, start: Start) -> None:
        rank_info = start.rank_info
        self._replies = rank_info.rank == 0 and rank_info.stage == rank_info.stages - 1
        """True if this rank replies to steps."""
        self._parent = parent = os.pidfd_open(start.parent)
        poller = Poller(parent)
        previous: Receiver | None = Reader(start.previous, poller) if start.previous else None
        following: Sender | None = Writer(start.following, poller) if start.following else None
        for each in start.sockets:
            peer = rank_info.at(each.rank)
            if peer.precedes(rank_info):
                previous = SocketLink(each.descriptor, f"rank {each.rank}")
            elif rank_info.precedes(peer):
                following = SocketLink(each.descriptor, f"rank {each.rank}")
        stage = PipelineStage(rank_info.stage, rank_info.stages, previous, following)
        self._worker = Worker(*_options_and_group(start), stage)
        self._reader = Reader(start.inbox, poller)
        self._writer = Writer(start.outbox, poller)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """``eventfd`` that becomes readable when an adapter has been read."""
        self._running: deque[Callable[[], StepOutput]] = deque()
        """Functions that wait for the steps in flight, oldest first. If the worker is ``asynchronous``, one step may
        be in flight while the next is submitted."""
        self._poll = select.poll()
        for descriptor in (self._reader.descriptor, parent, self._wake):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        """Answer messages until ``Close``, or until the executor's process ends."""
        while True:
            while not self._reader.has_message():
                if self._running:
                    self._answer_step()
                    continue
                self._poll.poll()
                if self._woken():
                    self._worker.poll()
                if not self._reader.has_message() and self._parent_ended():
                    return
            message = to_worker.decode(self._reader.receive())
            while self._running and not isinstance(message, StepInput):
                self._answer_step()
            if isinstance(message, Close):
                return
            self._answer(message)
            while len(self._running) > self._worker.asynchronous:
                self._answer_step()

    def _answer(self, message: ToWorker) -> None:
        match message:
            case StepInput():
                self._running.append(self._submit(message))
            case Call(number, call):
                try:
                    future = self._worker.call(call)
                except Exception as error:
                    future = Future()
                    future.set_exception(error)
                future.add_done_callback(
                    lambda done: self._reply(lambda: CallReply(number, done.result()), CallReply(number))
                )
                for reading in self._worker.pending_loads:
                    reading.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))
                if isinstance(call, LoadModel):
                    gc.collect()
                    gc.freeze()  # exclude the loaded model from later garbage collections

    def _submit(self, step: StepInput) -> Callable[[], StepOutput]:
        """Submit a step. Returns a function that waits for its output, or raises its error."""
        grammar_bitmask = _IncomingBitmask(self._reader) if step.has_grammar_bitmask else None
        submitted = self._worker.submit(step, grammar_bitmask)
        if grammar_bitmask:
            grammar_bitmask.result()  # remove the bitmask from the ring even if the step failed before reading it
        return submitted

    def _answer_step(self) -> None:
        """Wait for the oldest step in flight, and send the reply if this rank replies to steps."""
        result = self._running.popleft()
        if self._replies:
            self._reply(lambda: StepReply(result()), StepReply())
            return
        try:  # the replying rank has the same output, or fails together with this rank
            result()
        except Exception as error:
            _failed(error)

    def _reply(self, make: Callable[[], FromWorker], otherwise: FromWorker) -> None:
        """Send the message returned by ``make``. If ``make`` fails, or a value exceeds ``MAX_VALUE_BYTES`` when
        encoded, send ``otherwise`` with ``failed`` set to the error."""
        try:
            message = encoder.encode(make())
        except Exception as error:
            otherwise.failed = _failed(error)
            message = encoder.encode(otherwise)
        self._writer.send(message)

    def _woken(self) -> bool:
        try:
            return bool(os.eventfd_read(self._wake))
        except BlockingIOError:
            return False

    def _parent_ended(self) -> bool:
        return bool(select.select([self._parent], [], [], 0)[0])


class _IncomingBitmask(Future[np.ndarray]):
    """The grammar bitmask, the next message after its step. ``result`` reads it from the ring."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def result(self, timeout: float | None = None) -> np.ndarray:
        if not self.done():
            message = to_worker.decode(self._reader.receive())
            assert isinstance(message, GrammarBitmask)
            self.set_result(message.bitmask)
        return super().result()


def _options_and_group(start: Start) -> tuple[EngineOptions, Group]:
    """Bind the process to the rank's cores. Returns the options with the rank's threads and device, and its group."""
    if start.memory is None:
        return start.options, SINGLE_RANK
    from penstock.parallel.shared_memory import SPINS, PeerLink, SharedMemoryGroup  # this module imports the kernels

    rank_info, usable = start.rank_info, usable_cores()
    threads = max(1, usable // rank_info.local_size)
    if cores := cores_of_rank(start.options.cpu_binding, rank_info.local_rank, rank_info.local_size):
        os.sched_setaffinity(0, cores)
        threads = min(threads, usable_cores())
    options = msgspec.structs.replace(start.options, threads=start.options.threads or threads)
    spins = SPINS if usable >= rank_info.local_size else 0
    peers = [(each.descriptor, rank_info.at(each.rank)) for each in start.sockets]
    links = [
        PeerLink(descriptor, peer.rank, rank_info.sends_to(peer), peer.sends_to(rank_info))
        for descriptor, peer in peers
        if peer.stage == rank_info.stage
    ]
    group = SharedMemoryGroup(
        start.memory, rank_info.rank, rank_info.size, spins=spins, stage=rank_info.stage, links=links
    )
    device = gpu_of_rank(options.device, rank_info)
    if device is not None:
        options = msgspec.structs.replace(options, device=device)
        last = int(device.removeprefix("cuda:")) + rank_info.local_size - 1 - rank_info.local_rank
        if last >= torch.cuda.device_count():
            return options, group  # loading the model reports the missing GPU
    if rank_info.size == 1 or links or (device is None and options.ops != "cuda"):
        return options, group
    from penstock.parallel.device_group import DeviceGroup

    return options, DeviceGroup(
        group, torch.device(device or "cpu"), rendezvous_file(start.memory, start.parent, rank_info.stage)
    )


def gpu_of_rank(device: str, rank_info: RankInfo) -> str | None:
    """Name of a rank's GPU, ``cuda:N``, if the engine has several ranks; None on CPUs. The GPU may not exist.

    Args:
        device: the option ``device``; with ``cuda:N``, ``N`` is the GPU of the node's first rank.
    """
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        first = device.partition(":")[2]
        return f"cuda:{(int(first) if first.isdecimal() else 0) + rank_info.local_rank}"
    return None


def _failed(error: BaseException) -> Failed:
    if isinstance(error, ConnectionError):  # another node is lost, so no further step can be computed
        logger.error("%s", error)
        raise SystemExit(LINK_LOST) from error
    if isinstance(error, PenstockError):
        return Failed(str(error), error.failure)
    logger.error("a step or call of the worker has failed", exc_info=error)
    return Failed(f"{type(error).__name__}: {error}")


def _exit_with(parent: int) -> None:
    """Wait until the executor's process ends, then exit this process at once, even during a step."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent)], [], [])
    os._exit(1)


def run(start: Start) -> None:
    """Run the worker until the executor sends ``Close`` or its process ends."""
    if start.logs:
        logs.set_up(start.logs, "worker")
    threading.Thread(target=_exit_with, args=(start.parent,), daemon=True).start()
    with contextlib.suppress(PeerLostError):
        WorkerProcess(start).run()
