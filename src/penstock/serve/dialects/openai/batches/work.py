"""Concurrent processing of the lines of a batch, with retries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec

from penstock.core import Code, Failure, PenstockError
from penstock.serve.dialects.openai.batch import BatchError, BatchLine, BatchResponse, answer
from penstock.serve.dialects.openai.schema import error_of
from penstock.serve.http.reply import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.status import STATUS
from penstock.serve.http.unknown_fields import UnknownFieldLog, UnknownFields
from penstock.serve.models.served_models import ServedModel, when_loaded

TRIES = 3
"""Number of engine crashes after which a request is not retried, as the request may have caused the crashes."""

RETRY_INTERVAL = 1.0
"""Maximum time in seconds until a line is retried that was refused because too many requests were open."""

Record = Callable[[str | None, BatchResponse | None, BatchError | None], None]


class Work:
    """One run over the requests of a batch file.

    Args:
        find: returns the model of a line. Raises ``PenstockError`` if the model is not served.
        watch: done when the engine has stopped and will not be restarted.
        record: called with the custom_id, response and error of each line when it has been processed.
        tenant: tenant of the requests (``RequestRecord.tenant``).
        patient: retry lines that are refused as overloaded, or while the engine sleeps; for a shared engine.
    """

    def __init__(
        self,
        find: Callable[[BatchLine], ServedModel],
        watch: asyncio.Future[None],
        record: Record,
        tenant: str = "",
        patient: bool = False,
    ) -> None:
        self._find = find
        self._watch = watch
        self._record = record
        self._tenant = tenant
        self._patient = patient
        self._open = 0
        self._once = UnknownFieldLog()
        self._one_ended = asyncio.Condition()
        self.answered = self.failed = 0
        """Number of lines with a successful result (``answered``), and with an error (``failed``)."""
        self.tokens = 0
        """Number of tokens generated."""
        self.stopped = False
        """True if lines were not processed because the engine has stopped."""

    async def run(self, lines: Iterator[BatchLine | BatchError], at_once: int) -> None:
        """Process all lines, ``at_once`` at a time. Ends early if the engine has stopped (``watch``)."""
        workers = [asyncio.create_task(self._work(lines)) for _ in range(at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, lines: Iterator[BatchLine | BatchError]) -> None:
        for line in lines:
            if isinstance(line, BatchError):
                self.failed += 1
                self._record(None, None, line)
                continue
            response = await self._respond(line)
            async with self._one_ended:
                self._one_ended.notify()
            if response is None:
                self.stopped = True
                return
            if response.status_code == 200:
                self.answered += 1
            else:
                self.failed += 1
            self._record(line.custom_id, response, None)

    async def _respond(self, line: BatchLine) -> BatchResponse | None:
        """Process a line, with retries; returns None if the engine has stopped."""
        request_id, crashes = uuid4().hex, 0
        while True:
            record = RequestRecord(request_id, tenant=self._tenant)
            engines: set[int] = set()
            try:
                service = await when_loaded(partial(self._find, line))
                engines = _engines(service)
                record.unknown = UnknownFields(service.options.strict_requests)
                status, body = await self._answer(service, record, line)
            except PenstockError as error:
                record.failure = error.failure
                status, body = STATUS[error.failure.code], encode(error_of(error.failure))
            self._once.log(request_id, "batch", record.unknown)
            if _is(record.failure, Code.UNAVAILABLE):
                if not await self._engine_restarted(service):
                    return None
                crashes += _engines(service) != engines
                if crashes < TRIES and (self._patient or _engines(service) != engines):
                    await self._rest(_engines(service) == engines)
                    continue
            elif _is(record.failure, Code.OVERLOADED) and (self._open or self._patient):
                await self._rest(not self._open)
                continue
            self.tokens += record.log_fields.get("output", 0)
            return BatchResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body))

    async def _answer(self, service: ServedModel, record: RequestRecord, line: BatchLine) -> tuple[int, bytes]:
        """Status and body of a response. Raises ``PenstockError`` (``overloaded``) if too many requests are open."""
        with service.admit():
            self._open += 1
            try:
                return await answer(service, record, line.url, bytes(line.body))
            finally:
                self._open -= 1

    async def _rest(self, alone: bool) -> None:
        """Wait until another line has finished, for at most ``RETRY_INTERVAL``.

        Args:
            alone: no other line is being processed; wait for the full ``RETRY_INTERVAL``.
        """
        if alone:
            await asyncio.sleep(RETRY_INTERVAL)
            return
        async with self._one_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_INTERVAL):
                    await self._one_ended.wait()

    async def _engine_restarted(self, service: ServedModel) -> bool:
        """Wait until the engine is ready; returns False if it has stopped (``watch``)."""
        ready = asyncio.ensure_future(service.gateway.engine_pool.ready())
        waited: set[asyncio.Future[Any]] = {ready, self._watch}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return not self._watch.done()


def _engines(service: ServedModel) -> set[int]:
    """Process ids of the running engines. The set changes when an engine crashes and is restarted."""
    return {report.pid for report in service.gateway.engine_pool.reports}


def _is(failure: Failure | None, code: Code) -> bool:
    return failure is not None and failure.code is code
