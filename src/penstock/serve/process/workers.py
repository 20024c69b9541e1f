"""The API processes as the supervisor sees them: started, told of its models, and started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from penstock.core import Code, Failure, PenstockError
from penstock.engine.service.launcher import Deaths, end, in_words

from ..models.messages import WRONG, Done, Left, Load, Met, Models, Unfit, Unload, WorkerStart, decode_from_worker, line

logger = logging.getLogger("penstock")

STOPPING = Failure(Code.UNAVAILABLE, "the server is stopping")
INTERNAL = Failure(Code.INTERNAL, "an error of the server; its log says more")


class Worker:
    """One API process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.met: set[str] = set()
        """Addresses of the engines whose models it serves."""
        self.unfit: dict[str, Failure] = {}
        """Of those whose models it cannot serve, with the reason."""
        self.left: set[str] = set()
        """Of those being unloaded for which it has nothing open any more."""

    def tell(self, message: msgspec.Struct) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has just died
            self.process.stdin.write(line(message))


class Workers:
    """The API processes.

    Args:
        starts: what each is told first.
        asked: does what a client of one of them asks for; raises ``PenstockError`` where it cannot.
    """

    def __init__(self, starts: Sequence[WorkerStart], asked: Callable[[Load | Unload], Awaitable[None]]) -> None:
        self._starts = starts
        self._asked = asked
        self._workers: dict[int, Worker] = {}
        self._models = Models(())
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.wrong = False
        """Whether one has ended since no other start would help; it has said why."""

    async def keep(self) -> None:
        """Run them; returns when one dies too often, or can never start."""
        tasks = [asyncio.create_task(self._keep(start)) for start in self._starts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()

    def tell(self, models: Models) -> None:
        """Which models there are from now on."""
        self._models = models
        for worker in self._workers.values():
            worker.tell(models)

    async def met(self, engine: str = "") -> None:
        """Wait until all serve the model of the engine at this address; without one, until all serve.

        Raises ``PenstockError`` where one cannot.
        """

        def met() -> bool:
            for worker in self._workers.values():
                if failure := worker.unfit.get(engine):
                    raise PenstockError.of(failure)
            return len(self._workers) == len(self._starts) and all(engine in w.met for w in self._workers.values())

        async with self._changed:
            await self._changed.wait_for(met)

    async def left(self, engine: str) -> None:
        """Wait until none has anything open for the model of the engine at this address, which is being unloaded."""
        async with self._changed:
            await self._changed.wait_for(lambda: all(engine in w.left for w in self._workers.values()))

    async def close(self, patience: float) -> None:
        """End them, by force after so many seconds; what clients of theirs have asked for ends at once."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(end(worker.process, patience) for worker in self._workers.values()))

    def kill(self) -> None:
        """End them at once."""
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()

    async def _keep(self, start: WorkerStart) -> None:
        """Run one, and another when it dies; returns when they die too often."""
        deaths = Deaths()
        while True:
            worker = self._workers[start.number] = await _launch(start)
            worker.tell(self._models)
            await self._listen(worker)
            status = await worker.process.wait()
            if status == WRONG:
                self.wrong = True
                return
            if self._closing:
                await asyncio.Event().wait()
            del self._workers[start.number]
            await self._tell_waiting()
            _forget(worker.process.pid)
            logger.error("API process %d (process %d) ended: %s", start.number, worker.process.pid, in_words(status))
            if deaths.too_many():
                logger.error("API processes have died too often and are not started again")
                return

    async def _listen(self, worker: Worker) -> None:
        """Until it has nothing more to say."""
        assert worker.process.stdout is not None
        while said := await worker.process.stdout.readline():
            match decode_from_worker(said):
                case Met(engine):
                    worker.met.add(engine)
                    await self._tell_waiting()
                case Unfit(engine, failure):
                    worker.unfit[engine] = failure
                    await self._tell_waiting()
                case Left(engine):
                    worker.left.add(engine)
                    await self._tell_waiting()
                case asked:
                    task = asyncio.create_task(self._answer(worker, asked))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _tell_waiting(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _answer(self, worker: Worker, asked: Load | Unload) -> None:
        failure = None
        try:
            if self._closing:
                raise PenstockError.of(STOPPING)
            await self._asked(asked)
        except PenstockError as error:
            failure = error.failure
        except asyncio.CancelledError:
            failure = STOPPING
        except Exception:
            logger.exception("%s could not be %sed", asked.name, type(asked).__name__.lower())
            failure = INTERNAL
        worker.tell(Done(asked.number, failure))


async def _launch(start: WorkerStart) -> Worker:
    command = [sys.executable, "-m", "penstock.serve.process.worker"]
    worker = Worker(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, pass_fds=start.sockets))
    worker.tell(start)
    return worker


def _forget(pid: int) -> None:
    """What a dead process counts no more: how many requests it has open."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid)
