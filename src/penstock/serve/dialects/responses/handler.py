"""Handler of one request of the Responses API."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import msgspec

from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.generation import ChatGeneration
from penstock.serve.http.reply import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel
from penstock.text import ToolCall

from .convert import namespaces, to_chat_request
from .events import Events, OutputItemStream, usage_of
from .schema import ResponsesRequest, conversation_of

Document = dict[str, Any]
"""A response object of the Responses API."""
ECHOED_FIELDS = (
    "instructions max_output_tokens metadata previous_response_id reasoning temperature text tool_choice tools top_p "
    "user service_tier"
).split()
"""Fields of the request that the response repeats."""


class ResponseHandler(ChatGeneration):
    """Handler of one Responses request.

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
        self._request = msgspec.structs.replace(request, input="")
        self._name = record.request_id if save is None else uuid4().hex  # a client may reuse a request id
        self._created = int(time.time())
        if begun:
            self._name, self._created = begun["id"].removeprefix("resp_"), begun["created_at"]
        if request.background:
            self.call_seed = self._name
        self._save = save
        self._stores = stores
        self._items = OutputItemStream(self._name, events.event, namespaces(request.tools))

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        return encode(await self._store(self._finished_response(outputs[0])))

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        completion, event, events = output.outputs[0], self._events.event, b""
        if completion.index not in self.cursors:
            events = self._begin()
        events += self._items.add(self.delta(completion))
        if not completion.finished:
            return events
        status = self._status(output)
        events += self._items.end(self._item_status(output))
        document = await self._store(self._response(self._items.items, status, output))
        return events + event(f"response.{status}", response=document)

    async def computed(self) -> Document:
        """Generate the output, and return the finished response. Raises ``PenstockError`` if the request fails.

        With ``stream`` the events are added to ``events``, one delta per token, so that each process that computes the
        response generates the same events.
        """
        if not self._request.stream:
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
        empty, event = self._response([], "in_progress"), self._events.event
        return event("response.created", response=empty) + event("response.in_progress", response=empty)

    def _finished_response(self, output: RequestOutput) -> Document:
        status = self._status(output)
        self._items.add(self.delta(output.outputs[0]))
        self._items.end(self._item_status(output))
        return self._response(self._items.items, status, output)

    def pending(self, status: str) -> Document:
        """The response object before there is any output."""
        return self._response([], status)

    async def _store(self, document: Document) -> Document:
        """Store the finished response if requested; returns it with the field ``store`` set to the result."""
        if self._save:
            document["store"] = await self._save(document)
        return document

    def _status(self, output: RequestOutput) -> str:
        completion = output.outputs[0]
        return "incomplete" if completion.finish_reason == "length" or self.cuts_call(completion) else "completed"

    def _item_status(self, output: RequestOutput) -> str:
        """Status of the last item. A tool call is completed if its arguments are complete."""
        completion = output.outputs[0]
        parts = self.message(completion).parts
        if parts and isinstance(parts[-1], ToolCall) and parts[-1].has_object:
            return "completed"
        return self._status(output)

    def _response(self, items: list[Document], status: str, output: RequestOutput | None = None) -> Document:
        """The response object. ``output`` is the final output; None while the response is in progress."""
        request = self._request
        echoed = {name: msgspec.to_builtins(getattr(request, name)) for name in ECHOED_FIELDS}
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": request.background is True,
            "error": None,
            "incomplete_details": _incomplete_details(status, output),
            "model": self.model,
            "output": items,
            "usage": usage_of(output) if output else None,
            **echoed,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": echoed["tool_choice"] or "auto",
            "tools": echoed["tools"] or [],
            "text": echoed["text"] or {"format": {"type": "text"}},
            "store": self._stores,
            "conversation": {"id": conversation} if (conversation := conversation_of(request)) else None,
            "truncation": "disabled",
        }


def _incomplete_details(status: str, output: RequestOutput | None) -> Document | None:
    if status != "incomplete":
        return None
    has_stopped = output is not None and output.outputs[0].finish_reason == "stop"
    return {"reason": "stop_sequence" if has_stopped else "max_output_tokens"}
