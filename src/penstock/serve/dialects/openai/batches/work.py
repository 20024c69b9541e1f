"""Answers the lines of a batch concurrently, with retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import msgspec

from penstock.core import Code, Failure, PenstockError
from penstock.serve.dialects.openai.batch import BatchError, BatchLine, BatchResponse, answer
from penstock.serve.dialects.openai.responses import encode, error_of
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.status import STATUS
from penstock.serve.http.unknown_fields import UnknownFieldLog, UnknownFields
from penstock.serve.models.service import ModelService

TRIES = 3
"""Engine deaths after which a request is not tried again, as it may have caused them."""

LOAD_INTERVAL = 0.5
"""Seconds between two looks for a model that is being loaded."""

Record = Callable[[str | None, BatchResponse | None, BatchError | None], None]


class Work:
    """Answers lines.

    Args:
        find: the model that answers a line. Raises ``PenstockError`` where it is not served.
        watch: ends when the engine is not started again any more.
        record: called with each line's custom_id, response and error as they come.
    """

    def __init__(self, find: Callable[[BatchLine], ModelService], watch: asyncio.Future[None], record: Record) -> None:
        self._find = find
        self._watch = watch
        self._record = record
        self._open = 0
        self._once = UnknownFieldLog()
        self._one_ended = asyncio.Condition()
        self.answered = self.failed = 0
        """Lines with a successful result, and with another."""
        self.tokens = 0
        """Number of tokens generated."""
        self.stopped = False
        """Whether lines are left because the engine is gone."""

    async def run(self, lines: Iterator[BatchLine | BatchError], at_once: int) -> None:
        """Returns when no line is left, or the engine is gone."""
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
        """The result of a line; None where the engine is gone."""
        request_id, deaths = uuid4().hex, 0
        try:
            service = await self._served(line)
        except PenstockError as error:
            body = encode(error_of(error.failure))
            return BatchResponse(status_code=STATUS[error.failure.code], request_id=request_id, body=msgspec.Raw(body))
        while True:
            record = RequestRecord(request_id, unknown=UnknownFields(service.options.strict_requests))
            self._open += 1
            status, body = await answer(service, record, line.url, bytes(line.body))
            self._open -= 1
            self._once.log(request_id, "batch", record.unknown)
            if _is(record.failure, Code.UNAVAILABLE):
                deaths += 1
                if not await self._engine_restarted(service):
                    return None
                if deaths < TRIES:
                    continue
            elif _is(record.failure, Code.OVERLOADED) and self._open:
                async with self._one_ended:
                    await self._one_ended.wait()
                continue
            self.tokens += record.facts.get("output", 0)
            return BatchResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body))

    async def _served(self, line: BatchLine) -> ModelService:
        """The model of a line, once it is loaded. Raises ``PenstockError`` where it is not served."""
        while True:
            try:
                return self._find(line)
            except PenstockError as error:
                if error.failure.code is not Code.UNAVAILABLE:
                    raise
            await asyncio.sleep(LOAD_INTERVAL)

    async def _engine_restarted(self, service: ModelService) -> bool:
        """Wait for the engine's restart; False where it is gone."""
        ready = asyncio.ensure_future(service.gateway.engine_pool.ready())
        waited: set[asyncio.Future[Any]] = {ready, self._watch}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return not self._watch.done()


def _is(failure: Failure | None, code: Code) -> bool:
    return failure is not None and failure.code is code
