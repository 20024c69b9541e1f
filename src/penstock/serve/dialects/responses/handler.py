"""Handler of one request of the Responses API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import uuid4

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.generation import ChatGeneration
from penstock.serve.http.reply import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel

from .convert import namespaces, to_chat_request
from .document import Document, ResponseDocument
from .events import Events, OutputItemStream, usage_of
from .schema import ResponsesRequest


class ResponseHandler(ChatGeneration):
    """Handler of one Responses request without MCP tools.

    Args:
        save: stores the finished response (a ``ResponseSaver``); returns True if the response object was stored.
        stores: True if the response object is going to be stored.
    """

    def __init__(
        self,
        service: ServedModel,
        record: RequestRecord,
        request: ResponsesRequest,
        size: int,
        events: Events,
        save: Callable[[Document], Awaitable[bool]] | None = None,
        stores: bool = False,
    ) -> None:
        chat = to_chat_request(request, service.template_variables, service.sees_images)
        super().__init__(service, record, chat, size, keeps_body=save is not None)
        self._events = events
        self._save = save
        name = response_name(record, save is not None)
        self._document = ResponseDocument(request, name, self.model, stores)
        self._items = OutputItemStream(name, events.event, namespaces(request.tools))

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        return encode(await self._store(self._finished_response(outputs[0])))

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        completion, event, events = output.outputs[0], self._events.event, b""
        if completion.index not in self.cursors:
            empty = self.pending("in_progress")
            events = event("response.created", response=empty) + event("response.in_progress", response=empty)
        events += self._items.add(self.delta(completion))
        if not completion.finished:
            return events
        status = status_of(output)
        events += self._items.end(status)
        document = await self._store(self._document.build(self._items.items, status, usage_of(output)))
        return events + event(f"response.{status}", response=document)

    async def computed(self) -> Document:
        """Generate the output, and return the finished response. Raises ``PenstockError`` if the request fails."""
        (output,) = await self.finished()
        return self._finished_response(output)

    def _finished_response(self, output: RequestOutput) -> Document:
        status = status_of(output)
        self._items.add(self.delta(output.outputs[0]))
        self._items.end(status)
        return self._document.build(self._items.items, status, usage_of(output))

    def pending(self, status: str) -> Document:
        """The response object before there is any output."""
        return self._document.build([], status)

    def failed(self, failure: Failure) -> Document:
        """The response object of a request that has failed."""
        return self._document.failed([], failure)

    async def _store(self, document: Document) -> Document:
        """Store the finished response if requested; returns it with the field ``store`` set to the result."""
        if self._save:
            document["store"] = await self._save(document)
        return document


def response_name(record: RequestRecord, is_stored: bool) -> str:
    """Id of the response without ``resp_``. A client may reuse a request id, so a stored response has another id."""
    return uuid4().hex if is_stored else record.request_id


def status_of(output: RequestOutput) -> str:
    return "incomplete" if output.outputs[0].finish_reason == "length" else "completed"
