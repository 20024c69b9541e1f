"""Worker that processes the batches of ``/v1/batches``, one at a time in each API process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core import PenstockError
from penstock.core.errors import bounded
from penstock.core.machine_errors import exhausted
from penstock.serve.dialects.openai.batch import BatchError, BatchLine, BatchResponse
from penstock.serve.models.served_models import ServedModel, ServedModels

from .results import BatchState, Results, open_private, requests, survey
from .work import Work

if TYPE_CHECKING:  # these modules import optional dependencies
    from penstock.serve.storage.batches import BatchStore, Document
    from penstock.serve.storage.files import FileStore

logger = logging.getLogger(__name__)

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that are not finished."""
POLL_INTERVAL = 2.0
"""Seconds between checks for batches that other API processes have added, cancelled or abandoned."""
MAX_ERRORS = 100
"""Maximum number of invalid lines that are listed in the errors of a failed batch."""
MAX_LINES = 50_000
"""Maximum number of requests in a batch."""


class _Body(msgspec.Struct):
    model: str | None = None


_model = msgspec.json.Decoder(_Body).decode


class BatchWorker:
    """Worker that processes batches in one API process.

    A batch is processed by the process that has locked its results file. If that process is killed, another process
    finds the file unlocked and continues with the lines that have no result.

    Args:
        at_once: maximum number of concurrent requests of a batch.
    """

    def __init__(self, served_models: ServedModels, batches: BatchStore, files: FileStore, at_once: int) -> None:
        self._served_models = served_models
        self._batches = batches
        self._files = files
        self._at_once = at_once
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Check for batches now. Called when a batch is added or cancelled."""
        self._wake.set()

    async def run(self) -> None:
        """Process batches until this task is cancelled."""
        with contextlib.suppress(PenstockError):
            await self._files.sweep()
        while True:
            self._wake.clear()
            try:
                opened = await self._batches.open()
            except PenstockError as error:
                logger.warning("cannot read the stored batches, will retry in %g s: %s", POLL_INTERVAL, error)
                opened = []
            for owner, name in _by_turns(opened):
                try:
                    await self._process(owner, name)
                except PenstockError as error:
                    logger.warning("batch %s is interrupted and will be retried: %s", name, error)
                except Exception as error:
                    if failure := exhausted(error):
                        logger.warning("batch %s is interrupted and will be retried: %s", name, failure.message)
                        continue
                    logger.exception("batch %s failed with an unexpected exception", name)
                    with contextlib.suppress(PenstockError):
                        await self._fail(name, [_problem("internal_error", "internal error; see the server's log")])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self._wake.wait()

    async def _process(self, owner: str, name: str) -> None:
        """Process a batch, unless another process is processing it."""
        path = self._files.path(f"{name}.partial")
        results = Results(path, private=True)
        try:
            await asyncio.to_thread(results.__enter__)
        except PenstockError:  # another process has locked the results file
            return
        with results.entered():
            current = await self._batches.change(name, lambda batch: batch)
            if current is not None and current["status"] in OPEN:
                await self._compute(owner, current, results, path)
            current = await self._batches.change(name, lambda batch: batch)
            if current is None or current["status"] not in OPEN:
                path.unlink(missing_ok=True)

    async def _compute(self, owner: str, document: Document, results: Results, path: Path) -> None:
        name, source = document["id"], self._files.path(document["input_file_id"])
        if not source.is_file():
            await self._fail(name, [_problem("input_file_not_found", "the input file no longer exists")])
            return
        if document["status"] == "validating":
            self._served_models.check_alive()
            max_size = self._served_models.max_body_size
            errors, total = await asyncio.to_thread(_check, source, document["endpoint"], max_size)
            if errors or not total:
                await self._fail(name, errors or [_problem("empty_file", "the input file has no requests")])
                return
            counts = {"total": total, "completed": 0, "failed": 0}
            await self._set(name, "in_progress", request_counts=counts)
        state = await asyncio.to_thread(lambda: survey(requests(source), results))
        status = await self._answer(owner, document, source, results, state)
        if status is None:
            return  # the engine has stopped; this or another process continues the batch later
        await self._set(name, "finalizing")
        await self._finish(owner, document, path, status)

    async def _answer(
        self, owner: str, document: Document, source: Path, results: Results, state: BatchState
    ) -> str | None:
        """Process the lines without a result; returns the final status of the batch, or None if lines remain."""
        name = document["id"]
        done = {"completed": state.skipped - state.failed, "failed": state.failed}

        def record(custom_id: str | None, response: BatchResponse | None, error: BatchError | None) -> None:
            results.add(custom_id, response, error)
            succeeded = response is not None and response.status_code == 200
            done["completed" if succeeded else "failed"] += 1

        current = await self._set_counts(name, done)
        if current is None or current["status"] == "cancelling":
            return "cancelled"
        if time.time() > document["expires_at"]:
            return "expired"
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = Work(self._find, never, record, owner, patient=True)
        left: Iterator[BatchLine | BatchError] = (line for line in requests(source) if results.find(line) is None)
        task = asyncio.create_task(work.run(left, self._at_once))
        try:
            while True:
                await asyncio.wait([task], timeout=POLL_INTERVAL)
                current = await self._set_counts(name, done)
                if current is None or current["status"] == "cancelling":
                    return "cancelled"
                if task.done():
                    await task
                    return None if work.stopped else "completed"
                if time.time() > document["expires_at"]:
                    return "expired"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _finish(self, owner: str, document: Document, path: Path, status: str) -> None:
        """Write the output file and the error file, and set the final status of the batch."""
        name, expires = document["id"], document.get("output_expires_after") or {}
        outputs, errors = self._files.path(f"file-{name}-output"), self._files.path(f"file-{name}-errors")
        sizes = await asyncio.to_thread(_split, path, outputs, errors)
        file_ids: dict[str, str] = {}
        for field, file, size in zip(("output_file_id", "error_file_id"), (outputs, errors), sizes, strict=True):
            if size:
                purpose = "batch_output"
                filename, lifetime = f"{name}_{field[:-8]}.jsonl", expires.get("seconds")
                stored = await self._files.register(owner, file.name, filename, purpose, size, lifetime)
                file_ids[field] = stored.id
        await self._set(name, status, **file_ids)
        path.unlink(missing_ok=True)

    def _find(self, line: BatchLine) -> ServedModel:
        try:
            model = _model(line.body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the handler reports the error
            model = None
        return self._served_models.find(model)

    async def _set(self, name: str, status: str, **fields: Any) -> None:
        """Change the status and other fields of a batch. The status ``cancelling`` is kept until the batch ends."""

        def change(batch: Document) -> Document:
            keeps = batch["status"] == "cancelling" and status in ("in_progress", "finalizing")
            return {**batch, **fields, f"{status}_at": int(time.time())} | ({} if keeps else {"status": status})

        await self._batches.change(name, change)

    async def _set_counts(self, name: str, done: dict[str, int]) -> Document | None:
        return await self._batches.change(
            name, lambda batch: {**batch, "request_counts": {**batch["request_counts"], **done}}
        )

    async def _fail(self, name: str, errors: list[dict[str, Any]]) -> None:
        await self._set(name, "failed", errors={"object": "list", "data": errors})


def _by_turns(batches: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Order batches round robin over owners, the oldest batch of each owner first."""
    by_owner: dict[str, list[tuple[str, str]]] = {}
    for batch in batches:
        by_owner.setdefault(batch[0], []).append(batch)
    for turn in zip_longest(*by_owner.values()):
        yield from (batch for batch in turn if batch)


def _check(path: Path, endpoint: str, max_size: int) -> tuple[list[dict[str, Any]], int]:
    """Validate an input file; returns the errors and the number of requests. Stops at too many errors or requests."""
    errors, total = [], 0
    for line in requests(path):
        total += 1
        if isinstance(line, BatchError):
            errors.append(_problem(line.code, line.message, line.line))
        elif len(bytes(line.body)) > max_size:
            message = f"{line.custom_id!r} has {len(bytes(line.body))} bytes; the maximum is {max_size}"
            errors.append(_problem("line_too_long", message))
        elif line.url != endpoint:
            message = f"{line.custom_id!r} has the url {line.url[:80]!r}; must be the batch's endpoint {endpoint}"
            errors.append(_problem("mismatched_endpoint", message))
        if total > MAX_LINES:
            message = f"the file has more than {MAX_LINES} requests; split it into several batches"
            errors.append(_problem("too_many_requests", message))
        if len(errors) >= MAX_ERRORS or total > MAX_LINES:
            break
    return errors, total


def _problem(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": bounded(message), "line": line, "param": None}


def _split(path: Path, outputs: Path, errors: Path) -> tuple[int, int]:
    """Split a results file into an output file and an error file; returns the sizes of both in bytes. An empty file is
    deleted. If a request has several results, the last one counts."""
    decode = msgspec.json.Decoder(_Result).decode
    last: dict[str, int] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file):
            last[decode(text).custom_id or f"line {number}"] = number
    kept = set(last.values())
    with path.open("rb") as file, open_private(outputs, "wb") as succeeded, open_private(errors, "wb") as failed:
        for number, text in enumerate(file):
            if number in kept:
                response = decode(text).response
                (succeeded if response and response.status_code == 200 else failed).write(text)
        sizes = succeeded.tell(), failed.tell()
    for size, file_path in zip(sizes, (outputs, errors), strict=True):
        if not size:
            file_path.unlink()
    return sizes


class _Status(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    custom_id: str | None = None
    response: _Status | None = None
