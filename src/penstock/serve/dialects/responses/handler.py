"""One request of the Responses API, from its input to a response."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import msgspec

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.generation import ChatGeneration
from penstock.serve.chat.stream_cursor import StreamCursor
from penstock.serve.dialects.openai.responses import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService

from .events import Events, OutputItemStream, usage_of
from .parse import namespaces, to_chat_request
from .requests import ResponsesRequest, conversation_of

Document = dict[str, Any]
"""A response object."""
ECHOED_FIELDS = (
    "instructions max_output_tokens metadata previous_response_id reasoning temperature text tool_choice tools top_p "
    "user service_tier"
).split()
"""Fields of the request that the response repeats."""


class ResponseHandler:
    """One request.

    Args:
        keep: keeps what is to be kept of the finished response, and returns whether the response itself is stored; None
            where nothing is.
        stores: whether the response itself is to be stored.
    """

    def __init__(
        self,
        service: ModelService,
        record: RequestRecord,
        request: ResponsesRequest,
        size: int,
        events: Events,
        keep: Callable[[Document], Awaitable[bool]] | None = None,
        stores: bool = False,
    ) -> None:
        chat = to_chat_request(request, service.template_variables, service.sees_images)
        self._chat = ChatGeneration(service, record, chat, size, keeps_body=keep is not None)
        self._namespaces = namespaces(request.tools)
        self._events = events
        self._request = msgspec.structs.replace(request, input="")
        self._name = record.request_id if keep is None else uuid4().hex  # a client may send an id twice
        self._created = int(time.time())
        self._keep = keep
        self._stores = stores

    async def full(self) -> AsyncGenerator[bytes, None]:
        document = await self.document()
        yield encode(await self._kept(document))

    async def document(self) -> Document:
        """The finished response. Raises ``PenstockError`` where the request fails."""
        items = OutputItemStream(self._name, lambda kind, **fields: b"", self._namespaces)
        last = await self._chat.final()
        items.add(StreamCursor().delta(self._chat.message(last.outputs[0])))
        items.end(self._status(last))
        return self._response(items.items, self._status(last), last)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        event, cursor = self._events.event, StreamCursor()
        items = OutputItemStream(self._name, event, self._namespaces)
        started = False
        async with aclosing(self._chat.deltas(cursor)) as deltas:
            async for output, delta in deltas:
                if not started:
                    started = True
                    empty = self._response(items.items, "in_progress")
                    yield event("response.created", response=empty) + event("response.in_progress", response=empty)
                if events := items.add(delta):
                    yield events
                if output.outputs[0].finished:
                    status = self._status(output)
                    ended = items.end(status)
                    document = await self._kept(self._response(items.items, status, output))
                    yield ended + event(f"response.{status}", response=document)

    def pending(self, status: str) -> Document:
        """The response before it has any output."""
        return self._response([], status)

    def failed(self, failure: Failure) -> Document:
        """The response of a request that has failed."""
        return self._response([], "failed") | {"error": {"code": "server_error", "message": failure.message}}

    async def _kept(self, document: Document) -> Document:
        """The finished response, which is stored if it is to be."""
        if self._keep:
            document["store"] = await self._keep(document)
        return document

    def _status(self, output: RequestOutput) -> str:
        return "incomplete" if output.outputs[0].finish_reason == "length" else "completed"

    def _response(self, items: list[Document], status: str, output: RequestOutput | None = None) -> Document:
        """The response object; ``output`` is the final output, None before it."""
        request = self._request
        given = {name: msgspec.to_builtins(getattr(request, name)) for name in ECHOED_FIELDS}
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": request.background is True,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._chat.model,
            "output": items,
            "usage": usage_of(output) if output else None,
            **given,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "text": given["text"] or {"format": {"type": "text"}},
            "store": self._stores,
            "conversation": {"id": conversation} if (conversation := conversation_of(request)) else None,
            "truncation": "disabled",
        }
