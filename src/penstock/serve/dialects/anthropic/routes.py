"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.generation import CallDelta, ChatGeneration, Delta
from penstock.serve.chat.prompt import ChatPrompt
from penstock.serve.dialects.endpoints import DialectRoutes
from penstock.serve.http.body import RequestBody
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.reply import Json, Reply, encode
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModel, ServedModels
from penstock.text import Message, MessagePart, ToolCall

from .convert import to_chat_request
from .models import add_model_routes, is_anthropic_client
from .schema import (
    CALL_ID_PREFIX,
    ERROR_FORMAT,
    PARSED_ERROR_FORMAT,
    CountTokensRequest,
    ErrorResponse,
    MessageResponse,
    MessagesRequest,
    TokenCount,
    event,
    stop_reason_of,
    usage_of,
)

T = TypeVar("T", bound=RequestBody)
Document = dict[str, Any]
SCHEMAS = (MessagesRequest, CountTokensRequest, MessageResponse, TokenCount, ErrorResponse)
SCHEMA_PREFIX = "anthropic."
"""Prefix of schema names in the OpenAPI document."""


def error_format_of(scope: Scope) -> ErrorFormat | None:
    """The error format for requests of Anthropic's clients to paths of OpenAI's API; None for all other requests."""
    return ERROR_FORMAT if scope["path"].startswith("/v1/models") and is_anthropic_client(scope) else None


class MessageHandler(ChatGeneration):
    """Handler of one Messages request."""

    def __init__(self, service: ServedModel, record: RequestRecord, request: MessagesRequest, size: int) -> None:
        chat = to_chat_request(request, service.template_variables, service.sees_images)
        super().__init__(service, record, chat, size)
        self._id = f"msg_{record.request_id}"
        self._max_tokens = request.max_tokens
        self._blocks = ContentBlockStream()

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        output, completion = outputs[0], outputs[0].outputs[0]
        message = self.message(completion)
        is_cut = self.cuts_call(completion)
        stop = stop_reason_of(completion, bool(message.tool_calls) and not is_cut, self._max_tokens)
        return encode(self._response(blocks_of(message, is_cut), output, **stop))

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        completion, events = output.outputs[0], b""
        if completion.index not in self.cursors:
            empty = self._response([], output)
            empty.usage.output_tokens = 0
            events += event("message_start", message=empty)
        events += self._blocks.add(self.delta(completion))
        if completion.finished:
            is_cut = self.cuts_call(completion)
            called = self.cursors[completion.index].num_tool_calls > 0 and not is_cut
            stop = stop_reason_of(completion, called, self._max_tokens)
            usage = msgspec.to_builtins(usage_of(output))
            is_incomplete = is_cut and self.message(completion).cut_call is not None
            events += self._blocks.end(is_incomplete) + event("message_delta", delta=stop, usage=usage)
        return events

    def format_end(self) -> bytes:
        return event("message_stop")

    def _response(self, content: list[Document], output: RequestOutput, **stop: Any) -> MessageResponse:
        return MessageResponse(id=self._id, model=self.model, content=content, usage=usage_of(output), **stop)


class AnthropicRoutes(DialectRoutes):
    """Routes of Anthropic's API. Once a body is converted, errors use the field names of Messages requests."""

    def convert(self, fields: dict[str, Any], schema: type[T], raw_request: Request) -> T:
        request = super().convert(fields, schema, raw_request)
        record_of(raw_request.scope).error_format = PARSED_ERROR_FORMAT
        return request


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add the routes of Anthropic's API."""
    routes.error_formats.add(ERROR_FORMAT, "/v1/messages")
    api = AnthropicRoutes(routes, served_models, None, SCHEMAS, SCHEMA_PREFIX, ErrorResponse)

    def create_message(request: MessagesRequest, record: RequestRecord, size: int) -> Response:
        service = served_models.find(request.model)
        handler = MessageHandler(service, record, request, size)
        return Reply.of(service, handler, PARSED_ERROR_FORMAT, request.stream)

    async def count_tokens(raw_request: Request) -> Response:
        def prompt_of(request: CountTokensRequest, record: RequestRecord, size: int) -> ChatPrompt:
            service = served_models.find(request.model)
            chat = to_chat_request(request, service.template_variables, service.sees_images)
            service.adapter_of(chat.model)
            return ChatPrompt(service, chat, size, record)

        prompt = await api.handle(raw_request, CountTokensRequest, prompt_of, media=True)
        return Json(TokenCount(input_tokens=await prompt.count_tokens()))

    add_model_routes(routes, served_models)
    create, summary = api.endpoint(MessagesRequest, create_message, media=True), "Create a message (Anthropic)"
    api.post("/v1/messages", create, summary, MessagesRequest, answer=MessageResponse, streamed=True)
    summary = "Count the tokens of a message request"
    api.post("/v1/messages/count_tokens", count_tokens, summary, CountTokensRequest, answer=TokenCount)


def blocks_of(message: Message, is_cut: bool = False) -> list[Document]:
    """The content blocks of a complete message.

    Args:
        is_cut: the message was cut off within a tool call. Its block, without input, is marked as incomplete.
    """
    blocks = [_block(part) for part in message.parts]
    if is_cut and message.cut_call:
        blocks[-1]["incomplete"] = True
    return blocks


def _block(part: MessagePart) -> Document:
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": CALL_ID_PREFIX + part.id, "name": part.name, "input": _input(part.arguments)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


class ContentBlockStream:
    """Builder of the events of a streamed message. At most one content block is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""
        """Type of the open content block; empty: no block is open."""

    def add(self, delta: Delta) -> bytes:
        """Add a delta to the content blocks; returns the encoded events."""
        events = b""
        for part in delta:
            if isinstance(part, CallDelta):
                events += self._call(part)
            elif part.kind == "reasoning":
                events += self._ensure_open("thinking", {"thinking": "", "signature": ""})
                events += self._delta(type="thinking_delta", thinking=part.text)
            else:
                events += self._ensure_open("text", {"text": ""})
                events += self._delta(type="text_delta", text=part.text)
        return events

    def end(self, is_incomplete: bool = False) -> bytes:
        """End the open content block; returns its stop event, or nothing if no block is open."""
        fields = {"incomplete": True} if is_incomplete else {}
        ended = event("content_block_stop", index=self._index, **fields) if self._open else b""
        self._open = ""
        return ended

    def _call(self, part: CallDelta) -> bytes:
        events = b""
        if part.id:
            events += self.end() + self._begin(
                "tool_use", {"id": CALL_ID_PREFIX + part.id, "name": part.name, "input": {}}
            )
        return events + (self._delta(type="input_json_delta", partial_json=part.arguments) if part.arguments else b"")

    def _ensure_open(self, kind: str, empty: Document) -> bytes:
        return b"" if self._open == kind else self.end() + self._begin(kind, empty)

    def _begin(self, kind: str, empty: Document) -> bytes:
        self._index += 1
        self._open = kind
        return event("content_block_start", index=self._index, content_block={"type": kind, **empty})

    def _delta(self, **delta: str) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)


def _input(arguments: str) -> Any:
    """Decode the JSON arguments of a tool call; returns an empty object if they are not a valid JSON object."""
    try:
        result = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}
