"""``/v1/files`` and ``/v1/batches``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple
from uuid import uuid4

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from penstock.core.errors import invalid
from penstock.serve.dialects.endpoints import DialectRoutes
from penstock.serve.http.access import Access
from penstock.serve.http.body import RequestBody
from penstock.serve.http.form import read_form
from penstock.serve.http.paging import page_document, page_query
from penstock.serve.http.reply import Json
from penstock.serve.http.request_record import record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModels

from ..schema import ErrorResponse, Metadata
from .worker import OPEN

if TYPE_CHECKING:  # what it imports may not be installed
    from penstock.serve.storage.batches import BatchStore, Document
    from penstock.serve.storage.files import FileStore, StoredFile

    from .worker import BatchWorker

DAY = 86_400
MAX_LISTED = 10_000
"""Entries of a page."""
READ_SIZE = 2**20


class ExpiresAfter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=30 * DAY)]


class BatchRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """A batch of requests, each a line of a file."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    """Of the files of results; at most ``storage_retention``."""


class FileRoutes:
    """The endpoints of files."""

    def __init__(self, files: FileStore, max_size: int, timeout: float) -> None:
        self._files = files
        self._max_size = max_size
        self._timeout = timeout

    async def upload(self, raw_request: Request) -> Response:
        async with read_form(raw_request, self._max_size, self._timeout) as (fields, file, size):
            purpose = fields.get("purpose")
            if not isinstance(purpose, str) or not purpose:
                raise invalid("purpose", "is missing; it is batch for requests")
            name = file.filename or "file"
            stored = await self._files.add(_tenant(raw_request), name, purpose, size, _pieces(file), _lifetime(fields))
        return Json(stored)

    async def list(self, raw_request: Request) -> Response:
        query, purpose = page_query(raw_request, MAX_LISTED), raw_request.query_params.get("purpose")
        return Json(page_document(await self._files.page(_tenant(raw_request), query, purpose)))

    async def retrieve(self, raw_request: Request) -> Response:
        return Json(await self._get(raw_request))

    async def content(self, raw_request: Request) -> Response:
        stored = await self._get(raw_request)
        path = self._files.path(stored.id)
        return FileResponse(path, media_type="application/octet-stream", filename=stored.filename)

    async def delete(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        await self._files.delete(_tenant(raw_request), name)
        return Json({"id": name, "object": "file", "deleted": True})

    async def _get(self, raw_request: Request) -> StoredFile:
        return await self._files.get(_tenant(raw_request), raw_request.path_params["name"])


class BatchRoutes:
    """The endpoints of batches."""

    def __init__(self, added: DialectRoutes, files: FileStore, batches: BatchStore, worker: BatchWorker) -> None:
        self._added = added
        self._files = files
        self._batches = batches
        self._worker = worker

    async def create(self, raw_request: Request) -> Response:
        request, _ = await self._added.read(raw_request, BatchRequest)
        tenant, now = _tenant(raw_request), int(time.time())
        file = await self._files.get(tenant, request.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise invalid("input_file_id", f"is a file for {file.purpose}; one for requests has the purpose batch")
        times = dict.fromkeys(
            f"{event}_at" for event in "in_progress finalizing completed failed expired cancelling cancelled".split()
        )
        document: Document = {
            "id": f"batch_{uuid4().hex}",
            "object": "batch",
            "endpoint": request.endpoint,
            "errors": None,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + DAY,
            **times,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": request.metadata,
            "output_expires_after": msgspec.to_builtins(request.output_expires_after),
        }
        await self._batches.add(tenant, document)
        self._worker.wake()
        return Json(document)

    async def list(self, raw_request: Request) -> Response:
        query = page_query(raw_request, MAX_LISTED)
        return Json(page_document(await self._batches.page(_tenant(raw_request), query)))

    async def retrieve(self, raw_request: Request) -> Response:
        return Json(await self._batches.get(_tenant(raw_request), raw_request.path_params["name"]))

    async def cancel(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        batch = await self._batches.get(_tenant(raw_request), name)
        if batch["status"] not in OPEN:
            raise invalid("batch_id", f"the batch is {batch['status']}, and cannot be cancelled any more")

        def change(batch: Document) -> Document:
            return {**batch, "status": "cancelling", "cancelling_at": batch["cancelling_at"] or int(time.time())}

        changed = await self._batches.change(name, change)
        self._worker.wake()
        return Json(changed or {})


class Batches(NamedTuple):
    """What batches need."""

    files: FileStore
    max_size: int
    """Bytes of the largest file."""
    batches: BatchStore
    worker: BatchWorker


def add_routes(routes: Routes, served_models: ServedModels, kept: Batches) -> None:
    """Add the endpoints of files and batches."""
    added = DialectRoutes(routes, served_models, schemas=(BatchRequest,), failure=ErrorResponse)
    add = partial(added.add, access=Access.PRIVATE)
    of_files = FileRoutes(kept.files, kept.max_size, served_models.options.client_timeout)
    add("/v1/files", of_files.upload, "Upload a file", method="POST")
    add("/v1/files", of_files.list, "The files")
    add("/v1/files/{name}", of_files.retrieve, "A file")
    add("/v1/files/{name}", of_files.delete, "Delete a file", method="DELETE")
    add("/v1/files/{name}/content", of_files.content, "The contents of a file")
    of_batches = BatchRoutes(added, kept.files, kept.batches, kept.worker)
    add("/v1/batches", of_batches.create, "Begin a batch", request=BatchRequest, method="POST")
    add("/v1/batches", of_batches.list, "The batches")
    add("/v1/batches/{name}", of_batches.retrieve, "A batch")
    add("/v1/batches/{name}/cancel", of_batches.cancel, "Cancel a batch", method="POST")


def _lifetime(form: FormData) -> int | None:
    """The seconds of a form's ``expires_after``; None where it has none. Raises ``PenstockError`` (``invalid``) where
    they are wrong."""
    given = {name: form.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if set(given.values()) == {None}:
        return None
    try:
        return msgspec.convert({**given}, ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise invalid(
            "expires_after", f"{error}; it has anchor=created_at, and seconds from 3600 to {30 * DAY}"
        ) from error


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while piece := await file.read(READ_SIZE):
        yield piece


def _tenant(raw_request: Request) -> str:
    return record_of(raw_request.scope).tenant
