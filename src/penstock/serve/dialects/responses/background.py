"""Computation of responses in the background, which another API process continues if this one ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from penstock.core import Code, Failure, PenstockError
from penstock.engine.service.client import STOPPING
from penstock.serve.http.reply import COMMENT_INTERVAL, WAITING
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.unexpected import unexpected
from penstock.serve.models.served_models import ServedModel, ServedModels, when_loaded

from .events import EventLog, Events
from .handler import Document, ResponseHandler
from .schema import ResponsesRequest, conversation_of
from .stored import ResponseSaver, Stores

if TYPE_CHECKING:  # this module imports optional dependencies
    from penstock.serve.storage.responses import Lease, StoredRequest

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 2.0
"""Seconds between heartbeats of this process, and between checks for responses that were cancelled or lost."""
LOST_AFTER = 10.0
"""Seconds without a heartbeat after which another process continues a response. The process that replaces the ended one
in the same server does so at once."""
SUSPECT_DEATHS, MAX_DEATHS = 2, 3
"""Number of processes that have ended while they computed a response after which it is suspected as the cause, and
after which it fails. A process computes one suspect at a time."""
SUSPECT_DELAY = 60.0
"""Seconds without a heartbeat after which a suspect is continued, so that it cannot cause three deaths of an API
process in a minute, which end the server."""
STORE_INTERVAL = 0.25
"""Seconds between writes of a stream's events to storage, and between reads by other processes."""
RETRY_INTERVAL = 1.0
"""Seconds until a response that another process has begun is tried again if too many requests are open."""


@dataclass(eq=False)
class Job:
    """A response that this process computes."""

    document: Document
    """The response object, without output."""
    request: ResponsesRequest
    saver: ResponseSaver
    log: EventLog
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while events are stored."""
    task: asyncio.Task[None] | None = None
    """Task that computes the response; None until the response is stored."""

    @property
    def name(self) -> str:
        result: str = self.document["id"]
        return result


class Background:
    """The responses that this API process computes in the background.

    A process has a lease on each response that it computes, and renews it by a heartbeat in the database. If a
    heartbeat stops, another process takes the lease and computes the response again. The stored request has a seed, so
    the output and the events of a stream are the same; events that are stored already are not stored again. A process
    that has lost its lease can store nothing, so heartbeats may be late.

    Args:
        place: ``ApiProcessStart.place``: an earlier process with the same name has ended.
    """

    def __init__(self, served_models: ServedModels, stores: Stores, place: str = "") -> None:
        self._served_models = served_models
        self._stores = stores
        self._store = stores.responses
        self._place = place
        self._worker = f"{place}.{uuid4().hex}"
        self._jobs: dict[str, Job] = {}
        self._seen: dict[str, tuple[tuple[str, float], float]] = {}
        """Worker and heartbeat of the responses of other processes, and the time since which both are unchanged
        (monotonic clock), by name. Clocks of different hosts are not compared."""
        self._suspect: Job | None = None
        """The last suspect that this process has continued."""
        self._stopping = False

    async def start(
        self,
        service: ServedModel,
        handler: ResponseHandler,
        saver: ResponseSaver,
        request: ResponsesRequest,
        log: EventLog,
    ) -> Document:
        """Store a response with the status ``queued``, and start to compute it; returns the queued response. Raises
        ``PenstockError`` as ``ResponseStore.add``.

        Args:
            handler: handler of ``request``.
            request: request with a seed, and with all items of its conversation.
            log: events of the handler, if the request is streamed.
        """
        queued = handler.pending("queued")
        job = self._jobs[queued["id"]] = Job(queued, request, saver, log)
        try:
            await saver.add(queued, self._worker, _stored_form(request, handler.model))
        except BaseException:
            del self._jobs[job.name]
            raise
        self._start(job, self._compute(job, service, handler))
        return queued

    def cancel(self, name: str) -> None:
        """Stop computing a response in this process. Other processes check for cancellation every
        ``CHECK_INTERVAL``."""
        if (job := self._jobs.get(name)) and job.task:
            job.task.cancel()

    async def run(self) -> None:
        """Renew this process's leases, and continue responses of processes that have ended, until cancelled. Then
        release the leases, so that other processes continue the responses."""
        try:
            while True:
                try:
                    await self._check()
                except PenstockError as error:
                    logger.warning("cannot read the background responses, will retry: %s", error)
                await asyncio.sleep(CHECK_INTERVAL)
        finally:
            self._stopping = True
            tasks = [job.task for job in self._jobs.values() if job.task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(PenstockError):  # they are taken over after ``LOST_AFTER``
                await self._store.release(self._worker)

    async def follow(self, owner: str, name: str, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed response with sequence numbers above ``after``, until it is finished. Only
        stored events are sent, which no process will contradict.

        Raises ``PenstockError`` as ``ResponseStore.events``.
        """
        last_sent = time.monotonic()
        while True:
            job = self._jobs.get(name)
            changed = job.log.changed if job else None
            events, ended = await self._store.events(owner, name, after)
            if events:
                after += len(events)
                yield b"".join(events)
                last_sent = time.monotonic()
            elif ended:
                return
            elif changed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COMMENT_INTERVAL):
                        await changed.wait()
            else:
                await asyncio.sleep(STORE_INTERVAL)
            if time.monotonic() - last_sent >= COMMENT_INTERVAL:
                yield WAITING
                last_sent = time.monotonic()

    # --- Leases -------------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Renew the leases, stop responses whose lease has ended, and take over those of processes that have ended."""
        if self._stopping:
            return
        computed = [job for job in self._jobs.values() if job.task]
        if computed:
            await self._store.beat(self._worker)
        leases = await self._store.leases()
        mine = {lease.name for lease in leases if lease.worker == self._worker}
        for job in computed:
            if job.name not in mine:  # cancelled, deleted, or taken over
                self.cancel(job.name)
        now, seen = time.monotonic(), self._seen
        self._seen = {}
        for lease in leases:
            if lease.name in self._jobs:
                continue
            state = lease.worker, lease.beat
            known, since = seen.get(lease.name, (state, now))
            since = since if known == state else now
            self._seen[lease.name] = state, since
            delay = LOST_AFTER
            if lease.worker and lease.deaths == SUSPECT_DEATHS:
                delay = SUSPECT_DELAY
            elif not lease.worker or (self._place and lease.worker.startswith(f"{self._place}.")):
                delay = 0.0  # released, of the process that this one replaces, or its failure could not be stored
            if now - since >= delay:
                await self._take_over(lease)

    async def _take_over(self, lease: Lease) -> None:
        """Continue a response of a process that has ended, unless another process does."""
        suspect = lease.deaths >= SUSPECT_DEATHS
        if suspect and self._suspect and self._suspect.name in self._jobs:
            return
        if (stored := await self._store.take_over(lease, self._worker)) is None:
            return
        message = "background response %s continues in this process: the process that computed it has ended"
        logger.warning(message, lease.name)
        request = msgspec.convert(stored.request, ResponsesRequest)
        items = [{name: value for name, value in item.items() if name != "id"} for item in stored.input]
        saver = ResponseSaver(self._stores, lease.owner, items, True, conversation_of(request))
        job = self._jobs[lease.name] = Job(stored.document, request, saver, EventLog())
        if suspect:
            self._suspect = job
        self._start(job, self._continue(job, stored))

    # --- Computation --------------------------------------------------------------------------------------------------

    def _start(self, job: Job, computation: Coroutine[Any, Any, None]) -> None:
        job.task = asyncio.create_task(self._run(job, computation))

    async def _run(self, job: Job, computation: Coroutine[Any, Any, None]) -> None:
        """Run the computation of a response, and store its events and its failure."""
        work = asyncio.create_task(computation)
        try:
            while not work.done():
                await asyncio.wait([work], timeout=STORE_INTERVAL if job.request.stream else None)
                await self._store_events(job)
            await work
        except PenstockError as error:
            if error.failure == STOPPING:
                self._stopping = True
            else:
                await self._fail(job, error.failure)
        except Exception as error:
            await self._fail(job, unexpected(error))
        finally:  # also if cancelled: the server is stopping, or the response was cancelled, deleted or taken over
            work.cancel()
            del self._jobs[job.name]
            job.log.wake_readers()

    async def _compute(self, job: Job, service: ServedModel, handler: ResponseHandler) -> None:
        with service.admit():
            if not await self._store.advance(job.saver.owner, self._worker, handler.pending("in_progress")):
                return
            document = await handler.computed()
            if await self._advance(job, document):
                await job.saver.extend(document)

    async def _continue(self, job: Job, stored: StoredRequest) -> None:
        """Compute a response that another process has begun."""
        events: list[bytes] = []
        if job.request.stream:
            events, _ = await self._store.events(job.saver.owner, job.name, -1)
            job.log = EventLog(events)
        if stored.deaths >= MAX_DEATHS:
            message = f"{stored.deaths} API processes have ended while they computed this response; it is not continued"
            raise PenstockError(Code.INTERNAL, message)
        size = len(msgspec.json.encode(stored.request))
        record = RequestRecord(job.name, tenant=job.saver.owner)
        while True:
            service = await when_loaded(lambda: self._served_models.find(job.request.model))
            await service.gateway.engine_pool.ready()
            job.log.wake_readers()
            log = job.log = EventLog(events)

            def handle(service: ServedModel = service, log: EventLog = log) -> tuple[int, ResponseHandler]:
                request, encoder = job.request, log if job.request.stream else Events()
                return 0, ResponseHandler(service, record, request, size, encoder, job.saver, True, job.document)

            try:
                handler = await self._served_models.parse(record, size, handle)
                await self._compute(job, service, handler)
                return
            except PenstockError as error:
                if error.failure.code is not Code.OVERLOADED:
                    raise
            finally:
                record.release_memory()
            await asyncio.sleep(RETRY_INTERVAL)

    async def _advance(self, job: Job, document: Document) -> bool:
        """Store the finished response with its last events. Returns False as ``ResponseStore.advance``."""
        async with job.lock:
            return await self._store.advance(job.saver.owner, self._worker, document, job.log.not_stored)

    async def _store_events(self, job: Job) -> None:
        """Store new events. They are kept if the database does not answer."""
        async with job.lock:
            last, encoded = job.log.not_stored
            if not encoded:
                return
            try:
                await self._store.add_events(job.saver.owner, self._worker, job.name, (last, encoded))
            except PenstockError as error:
                message = "cannot store events of the background response %s, will retry: %s"
                logger.warning(message, job.name, error)
            else:
                job.log.mark_stored(last)

    async def _fail(self, job: Job, failure: Failure) -> None:
        """Store the response as failed, unless it was cancelled or deleted, or another process continues it."""
        error = {"code": "server_error", "message": failure.message}
        document = job.document | {"status": "failed", "error": error}
        if job.request.stream:
            job.log.end("response.failed", response=document)
        try:
            await self._advance(job, document)
        except PenstockError as problem:
            message = "cannot store that the background response %s has failed (%s): %s"
            logger.error(message, job.name, failure.message, problem)


def with_seed(request: ResponsesRequest) -> ResponsesRequest:
    """The request with a random seed unless it has one, so that every process computes the same output."""
    if request.seed not in (None, -1):
        return request
    return msgspec.structs.replace(request, seed=random.getrandbits(63))


def _stored_form(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """The request as a JSON object, with the name of the model that computes it (default models may change)."""
    fields: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(request, model=model))
    if isinstance(fields["input"], list):
        fields["input"] = [_without_nulls(item) for item in fields["input"]]
    return _without_nulls(fields)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
