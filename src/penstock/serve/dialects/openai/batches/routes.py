"""OpenAI's files and batches API: ``/v1/files`` and ``/v1/batches``."""

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
from penstock.serve.dialects.endpoints import DialectRoutes, tenant_of
from penstock.serve.http.access import Access
from penstock.serve.http.body import RequestBody
from penstock.serve.http.form import read_form
from penstock.serve.http.paging import page_document, page_query
from penstock.serve.http.reply import Json
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModels

from ..schema import ErrorResponse, Metadata
from .worker import OPEN

if TYPE_CHECKING:  # these modules import optional dependencies
    from penstock.serve.storage.batches import BatchStore, Document
    from penstock.serve.storage.files import FileStore, StoredFile

    from .worker import BatchWorker

DAY = 86_400
MAX_LISTED = 10_000
"""Maximum number of entries in a page."""
READ_SIZE = 2**20
"""Bytes of an uploaded file that are read at a time."""


class ExpiresAfter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Expiry of a file: ``seconds`` after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=30 * DAY)]


class BatchRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to create a batch. Each line of the input file is one request."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    """Expiry of the output and error files; at most ``storage_retention`` after creation."""


class FileRoutes:
    """Endpoints to upload, list, retrieve and delete files."""

    def __init__(self, files: FileStore, max_size: int, timeout: float) -> None:
        self._files = files
        self._max_size = max_size
        self._timeout = timeout

    async def upload(self, raw_request: Request) -> Response:
        async with read_form(raw_request, self._max_size, self._timeout) as (fields, file, size):
            purpose = fields.get("purpose")
            if not isinstance(purpose, str) or not purpose:
                raise invalid("purpose", "is missing; use batch for files of requests")
            name, tenant = file.filename or "file", tenant_of(raw_request)
            stored = await self._files.add(tenant, name, purpose, size, _chunks(file), _lifetime(fields))
        return Json(stored)

    async def list(self, raw_request: Request) -> Response:
        query, purpose = page_query(raw_request, MAX_LISTED), raw_request.query_params.get("purpose")
        return Json(page_document(await self._files.page(tenant_of(raw_request), query, purpose)))

    async def retrieve(self, raw_request: Request) -> Response:
        return Json(await self._get(raw_request))

    async def content(self, raw_request: Request) -> Response:
        stored = await self._get(raw_request)
        path = self._files.path(stored.id)
        return FileResponse(path, media_type="application/octet-stream", filename=stored.filename)

    async def delete(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        await self._files.delete(tenant_of(raw_request), name)
        return Json({"id": name, "object": "file", "deleted": True})

    async def _get(self, raw_request: Request) -> StoredFile:
        return await self._files.get(tenant_of(raw_request), raw_request.path_params["name"])


class BatchRoutes:
    """Endpoints to create, list, retrieve and cancel batches."""

    def __init__(self, api: DialectRoutes, files: FileStore, batches: BatchStore, worker: BatchWorker) -> None:
        self._api = api
        self._files = files
        self._batches = batches
        self._worker = worker

    async def create(self, raw_request: Request) -> Response:
        request, _ = await self._api.read(raw_request, BatchRequest)
        tenant, now = tenant_of(raw_request), int(time.time())
        file = await self._files.get(tenant, request.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise invalid("input_file_id", f"has the purpose {file.purpose!r}; upload it with the purpose batch")
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
        return Json(page_document(await self._batches.page(tenant_of(raw_request), query)))

    async def retrieve(self, raw_request: Request) -> Response:
        return Json(await self._batches.get(tenant_of(raw_request), raw_request.path_params["name"]))

    async def cancel(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        batch = await self._batches.get(tenant_of(raw_request), name)
        if batch["status"] not in OPEN:
            raise invalid("batch_id", f"{name!r} has the status {batch['status']} and can no longer be cancelled")

        def change(batch: Document) -> Document:
            return {**batch, "status": "cancelling", "cancelling_at": batch["cancelling_at"] or int(time.time())}

        changed = await self._batches.change(name, change)
        self._worker.wake()
        return Json(changed or {})


class Batches(NamedTuple):
    """The stores of files and batches, and the worker that processes batches."""

    files: FileStore
    max_size: int
    """Maximum size of an uploaded file, bytes."""
    batches: BatchStore
    worker: BatchWorker


def add_routes(routes: Routes, served_models: ServedModels, services: Batches) -> None:
    """Add the endpoints of files and batches."""
    api = DialectRoutes(routes, served_models, schemas=(BatchRequest,), failure=ErrorResponse)
    add = partial(api.add, access=Access.PRIVATE)
    files = FileRoutes(services.files, services.max_size, served_models.options.client_timeout)
    add("/v1/files", files.upload, "Upload a file", method="POST")
    add("/v1/files", files.list, "List files")
    add("/v1/files/{name}", files.retrieve, "Retrieve a file")
    add("/v1/files/{name}", files.delete, "Delete a file", method="DELETE")
    add("/v1/files/{name}/content", files.content, "Retrieve the contents of a file")
    batches = BatchRoutes(api, services.files, services.batches, services.worker)
    add("/v1/batches", batches.create, "Create a batch", request=BatchRequest, method="POST")
    add("/v1/batches", batches.list, "List batches")
    add("/v1/batches/{name}", batches.retrieve, "Retrieve a batch")
    add("/v1/batches/{name}/cancel", batches.cancel, "Cancel a batch", method="POST")


def _lifetime(form: FormData) -> int | None:
    """The form field ``expires_after`` in seconds; None if absent. Raises ``PenstockError`` (``invalid``)."""
    given = {name: form.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if set(given.values()) == {None}:
        return None
    try:
        return msgspec.convert({**given}, ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise invalid(
            "expires_after", f"{error}; anchor must be created_at, and seconds from 3600 to {30 * DAY}"
        ) from error


async def _chunks(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(READ_SIZE):
        yield chunk
