"""Handler of one request of the Responses API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import uuid4

from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.generation import ChatGeneration
from penstock.serve.http.reply import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel
from penstock.text import ToolCall

from .convert import namespaces, to_chat_request
from .document import Document, ResponseDocument
from .events import Events, OutputItemStream, usage_of
from .schema import ResponsesRequest


class ResponseHandler(ChatGeneration):
    """Handler of one Responses request without MCP tools.

    Args:
        save: stores the finished response (a ``ResponseSaver``); returns True if the response object was stored.
        stores: True if the response object is going to be stored.
        begun: response object of a background response that another process has begun; None: a new response.
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
        begun: Document | None = None,
    ) -> None:
        chat = to_chat_request(request, service.template_variables, service.sees_images)
        super().__init__(service, record, chat, size, keeps_body=save is not None)
        self._events = events
        self._save = save
        name = begun["id"].removeprefix("resp_") if begun else response_name(record, save is not None)
        if request.background:
            self.call_seed = name
        self._streams = bool(request.stream)
        self._document = ResponseDocument(request, name, self.model, stores, begun)
        self._items = OutputItemStream(name, events.event, namespaces(request.tools))

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        return encode(await self._store(self._finished_response(outputs[0])))

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        completion, event, events = output.outputs[0], self._events.event, b""
        if completion.index not in self.cursors:
            events = self._begin()
        events += self._items.add(self.delta(completion))
        if not completion.finished:
            return events
        events += self._items.end(item_status(self, output))
        document = await self._store(self._build(output))
        return events + event(f"response.{document['status']}", response=document)

    async def computed(self) -> Document:
        """Generate the output, and return the finished response. Raises ``PenstockError`` if the request fails.

        With ``stream`` the events are added to ``events``, one delta per token, so that each process that computes the
        response generates the same events.
        """
        if not self._streams:
            (output,) = await self.finished()
            return self._finished_response(output)

        def add_token(output: RequestOutput) -> None:
            self._items.add(self.delta(output.outputs[0]))

        self._begin()
        self._options["on_token"] = add_token
        (output,) = await self.finished()
        document = self._finished_response(output)
        self._events.event(f"response.{document['status']}", response=document)
        return document

    def _begin(self) -> bytes:
        """Encode the first events."""
        empty, event = self.pending("in_progress"), self._events.event
        return event("response.created", response=empty) + event("response.in_progress", response=empty)

    def _finished_response(self, output: RequestOutput) -> Document:
        self._items.add(self.delta(output.outputs[0]))
        self._items.end(item_status(self, output))
        return self._build(output)

    def pending(self, status: str) -> Document:
        """The response object before there is any output."""
        return self._document.build([], status)

    @property
    def kept_items(self) -> list[Document]:
        """Output items that the response has if it fails."""
        return []

    async def _store(self, document: Document) -> Document:
        """Store the finished response if requested; returns it with the field ``store`` set to the result."""
        if self._save:
            document["store"] = await self._save(document)
        return document

    def _build(self, output: RequestOutput) -> Document:
        """The finished response object."""
        status = status_of(self, output)
        return self._document.build(self._items.items, status, usage_of(output), incomplete_reason(output))


def response_name(record: RequestRecord, is_stored: bool) -> str:
    """Id of the response without ``resp_``. A client may reuse a request id, so a stored response has another id."""
    return uuid4().hex if is_stored else record.request_id


def status_of(generation: ChatGeneration, output: RequestOutput) -> str:
    """Status of a response with this finished output."""
    completion = output.outputs[0]
    return "incomplete" if completion.finish_reason == "length" or generation.cuts_call(completion) else "completed"


def item_status(generation: ChatGeneration, output: RequestOutput) -> str:
    """Status of the last item. A tool call is completed if its arguments are complete."""
    parts = generation.message(output.outputs[0]).parts
    if parts and isinstance(parts[-1], ToolCall) and parts[-1].has_object:
        return "completed"
    return status_of(generation, output)


def incomplete_reason(output: RequestOutput) -> str:
    """Reason of the status ``incomplete``."""
    return "stop_sequence" if output.outputs[0].finish_reason == "stop" else "max_output_tokens"
