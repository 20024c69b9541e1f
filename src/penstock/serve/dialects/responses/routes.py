"""``/v1/responses``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.generation import ChatGeneration
from penstock.serve.chat.prompt import count_tokens
from penstock.serve.chat.stream_cursor import StreamCursor
from penstock.serve.dialects.openai.responses import ErrorResponse, encode, error_of
from penstock.serve.http.body import read_object
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.openapi import OBJECT, operation, reference
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModels
from penstock.serve.models.service import ModelService

from .events import Events, OutputItemStream, usage_of
from .parse import read, to_chat_request
from .requests import CountTokensRequest, ResponsesRequest

SCHEMAS = (ResponsesRequest, CountTokensRequest)
SCHEMA_PREFIX = "responses."
"""Prefix of schema names in the OpenAPI document."""
FIELD_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Field names of chats → those of responses, for errors."""


class ResponsesErrorFormat(ErrorFormat):
    """OpenAI's error format, with field names of responses.

    Args:
        names: field names of chats → those of responses.
        events: the stream's event counter, which an error continues.
    """

    dialect = "responses"

    def __init__(self, names: Mapping[str, str], events: Events) -> None:
        self._names = names
        self._events = events

    def error(self, failure: Failure) -> bytes:
        return encode(error_of(rename_field(failure, self._names)))

    def stream_error(self, failure: Failure) -> bytes:
        error = error_of(rename_field(failure, self._names)).error
        return self._events.event("error", code=error.type, message=error.message, param=error.param, error=error)


ERROR_FORMAT = ResponsesErrorFormat({}, Events())
"""Until a request has been read."""


class ResponseHandler:
    """One request, from its input to a response."""

    def __init__(
        self, service: ModelService, record: RequestRecord, request: ResponsesRequest, size: int, events: Events
    ) -> None:
        self._chat = ChatGeneration(
            service, record, to_chat_request(request, service.template_variables, service.sees_images), size
        )
        self._events = events
        self._request = request
        self._name = record.request_id
        self._created = int(time.time())

    async def full(self) -> AsyncGenerator[bytes, None]:
        items = OutputItemStream(self._name, lambda kind, **fields: b"")
        last = await self._chat.final()
        items.add(StreamCursor().delta(self._chat.message(last.outputs[0])))
        items.end(self._status(last))
        yield encode(self._response(items, last))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        event, cursor = self._events.event, StreamCursor()
        items = OutputItemStream(self._name, event)
        started = False
        async with aclosing(self._chat.deltas(cursor)) as deltas:
            async for output, delta in deltas:
                if not started:
                    started = True
                    empty = self._response(items, None)
                    yield event("response.created", response=empty) + event("response.in_progress", response=empty)
                if events := items.add(delta):
                    yield events
                if output.outputs[0].finished:
                    status = self._status(output)
                    yield items.end(status) + event(f"response.{status}", response=self._response(items, output))

    def _status(self, output: RequestOutput) -> str:
        return "incomplete" if output.outputs[0].finish_reason == "length" else "completed"

    def _response(self, items: OutputItemStream, output: RequestOutput | None) -> dict[str, Any]:
        """The response object so far; ``output`` is the final output, None before it."""
        request = self._request
        status = self._status(output) if output else "in_progress"
        given = {name: msgspec.to_builtins(getattr(request, name)) for name in ECHOED_FIELDS}
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._chat.model,
            "output": items.items,
            "usage": usage_of(output) if output else None,
            **given,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "text": given["text"] or {"format": {"type": "text"}},
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }


ECHOED_FIELDS = (
    "instructions max_output_tokens metadata reasoning temperature text tool_choice tools top_p user service_tier"
).split()
"""Fields of the request that the response repeats."""


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add the routes of OpenAI's Responses API."""

    async def create_response(raw_request: Request) -> Response:
        body = await served_models.read_body(raw_request)
        record, events = record_of(raw_request.scope), Events()
        request = read(read_object(body), ResponsesRequest, record.unknown)
        error_format = record.error_format = ResponsesErrorFormat(FIELD_NAMES, events)
        service = served_models.find(request.model)
        return Reply.of(
            service, ResponseHandler(service, record, request, len(body), events), error_format, request.stream
        )

    async def count_input_tokens(raw_request: Request) -> Response:
        body = await served_models.read_body(raw_request)
        unknown = record_of(raw_request.scope).unknown
        request = read(read_object(body), CountTokensRequest, unknown)
        service = served_models.find(request.model)
        count = await count_tokens(
            service, to_chat_request(request, service.template_variables, service.sees_images), len(body), unknown
        )
        return Response(
            encode({"object": "response.input_tokens", "input_tokens": count}), media_type="application/json"
        )

    for path, endpoint, request in (
        ("/v1/responses", create_response, ResponsesRequest),
        ("/v1/responses/input_tokens", count_input_tokens, CountTokensRequest),
    ):
        schema = reference(request, SCHEMA_PREFIX)
        described = operation(OBJECT, reference(ErrorResponse), schema, streamed=request is ResponsesRequest)
        routes.add(path, endpoint, method="POST", described=described)
