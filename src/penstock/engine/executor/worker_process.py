"""A worker in a process of its own: ``python -m penstock.engine.executor.worker_process``, which ``Processes`` starts.

It reads ``messages.Start`` on standard input and ends when the process that started it does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from penstock.config import logs
from penstock.core import PenstockError

from ..step import StepInput, encoder
from ..worker.worker import Worker
from .messages import (
    Answer,
    Call,
    Close,
    Computed,
    Failed,
    FromWorker,
    InitCache,
    Load,
    Masks,
    Profile,
    Start,
    Started,
    Step,
    ToWorker,
    to_worker,
)
from .ring import PeerLostError, Reader, Writer

logger = logging.getLogger(__name__)


class Process:
    """Answers an executor's messages, one after the other."""

    def __init__(self, start: Start) -> None:
        self._worker = Worker(start.options)
        self._parent = start.parent
        parent = os.pidfd_open(start.parent)
        self._reader = Reader(start.inbox, parent)
        self._writer = Writer(start.outbox, parent)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when an adapter has been read."""
        self._poll = select.poll()
        for descriptor in (self._reader.descriptor, parent, self._wake):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        """Until the executor ends."""
        while True:
            while not self._reader.waiting():
                self._poll.poll()
                if self._woken():
                    self._worker.poll()
                if not self._reader.waiting() and self._parent_ended():
                    return
            message = to_worker.decode(self._reader.receive())
            if isinstance(message, Close):
                return
            self._answer(message)

    def _answer(self, message: ToWorker) -> None:
        worker = self._worker
        match message:
            case Load():
                self._start(lambda: Started(info=worker.load()))
                gc.collect()
                gc.freeze()  # what is there now stays, and need not be looked through again and again
            case Profile():
                self._start(lambda: Started(profile=worker.profile()))
            case InitCache(blocks, host_blocks):

                def init() -> Started:
                    worker.init_cache(blocks, host_blocks)
                    return Started()

                self._start(init)
            case Step(step):
                self._send(self._compute(step))
            case Call(number, op):
                try:
                    future = worker.call(op)
                except Exception as error:
                    self._send(Answer(number, failed=_failed(error)))
                    return
                future.add_done_callback(lambda done: self._answered(number, done))
                for reading in worker.reading:
                    reading.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))

    def _compute(self, step: StepInput) -> Computed:
        masks = _Incoming(self._reader) if step.masked else None
        try:
            output = self._worker.execute(step, masks)
            return Computed(output)
        except Exception as error:
            return Computed(failed=_failed(error))
        finally:
            if masks:
                masks.result()  # were they not waited for, they must not be taken for the next message

    def _start(self, do: Callable[[], Started]) -> None:
        try:
            self._send(do())
        except Exception as error:
            self._send(Started(failed=_failed(error)))

    def _answered(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        self._send(Answer(number, failed=_failed(error)) if error else Answer(number, done.result()))

    def _send(self, message: FromWorker) -> None:
        self._writer.send(encoder.encode(message))

    def _woken(self) -> bool:
        try:
            return bool(os.eventfd_read(self._wake))
        except BlockingIOError:
            return False

    def _parent_ended(self) -> bool:
        return os.getppid() != self._parent


class _Incoming(Future[np.ndarray]):
    """Masks that follow their step."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def result(self, timeout: float | None = None) -> np.ndarray:
        if not self.done():
            message = to_worker.decode(self._reader.receive())
            assert isinstance(message, Masks)
            self.set_result(message.bits)
        return super().result()


def _failed(error: BaseException) -> Failed:
    if isinstance(error, PenstockError):
        return Failed(str(error), error.failure)
    logger.error("a worker could not do what it was asked", exc_info=error)
    return Failed(f"{type(error).__name__}: {error}")


def _end_with(parent: int) -> None:
    """End when the executor's process does, whatever is being computed."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent)], [], [])
    os._exit(1)


def main() -> None:
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=Start)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a terminal's goes to the whole group; the engine decides
        signal.signal(ignored, signal.SIG_IGN)
    if start.logs:
        logs.set_up(start.logs, "worker")
    threading.Thread(target=_end_with, args=(start.parent,), daemon=True).start()
    with contextlib.suppress(PeerLostError):
        Process(start).run()


if __name__ == "__main__":
    main()
