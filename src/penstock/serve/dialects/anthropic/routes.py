"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.core import Failure
from penstock.serve.chat.generation import ChatGeneration
from penstock.serve.chat.prompt import ChatPrompt
from penstock.serve.chat.stream_cursor import StreamCursor
from penstock.serve.http.access import Access
from penstock.serve.http.body import check_supported, convert, read_object
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.openapi import operation, reference
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModels
from penstock.serve.models.service import ModelService

from .models import add_model_routes, is_anthropic_client
from .parse import to_chat_request
from .requests import UNSUPPORTED_FIELDS, CountTokensRequest, MessagesRequest
from .responses import (
    ContentBlockStream,
    ErrorResponse,
    MessageResponse,
    TokenCount,
    blocks_of,
    encode,
    error_of,
    event,
    stop_reason_of,
    usage_of,
)

T = TypeVar("T", bound=msgspec.Struct)

SCHEMAS = (MessagesRequest, CountTokensRequest, MessageResponse, TokenCount, ErrorResponse)
SCHEMA_PREFIX = "anthropic."
"""Prefix of schema names in the OpenAPI document."""
FIELD_NAMES = {"prompt": "messages", "stop": "stop_sequences", "response_format": "output_config.format"}
"""Field names of chats → those of messages, for errors."""


class AnthropicErrorFormat(ErrorFormat):
    """Anthropic's error format.

    Args:
        names: field names of chats → those of messages.
    """

    dialect = "anthropic"

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def error(self, failure: Failure) -> bytes:
        return encode(error_of(rename_field(failure, self._names)))

    def stream_error(self, failure: Failure) -> bytes:
        return event("error", error=error_of(rename_field(failure, self._names)).error)


ERROR_FORMAT = AnthropicErrorFormat({})
"""Error format before the request is parsed."""
PARSED_ERROR_FORMAT = AnthropicErrorFormat(FIELD_NAMES)


def error_format_of(scope: Scope) -> ErrorFormat | None:
    """The error format for requests of Anthropic's clients at paths that OpenAI's API shares; else None."""
    return ERROR_FORMAT if scope["path"].startswith("/v1/models") and is_anthropic_client(scope) else None


class MessageHandler:
    """One request, from its messages to a message."""

    def __init__(self, service: ModelService, record: RequestRecord, request: MessagesRequest, size: int) -> None:
        self._chat = ChatGeneration(
            service, record, to_chat_request(request, service.template_variables, service.sees_images), size
        )
        self._id = f"msg_{record.request_id}"
        self._max_tokens = request.max_tokens

    async def full(self) -> AsyncGenerator[bytes, None]:
        last = await self._chat.final()
        completion = last.outputs[0]
        message = self._chat.message(completion)
        ending = stop_reason_of(completion, bool(message.tool_calls), self._max_tokens)
        answer = MessageResponse(
            id=self._id, model=self._chat.model, content=blocks_of(message), usage=usage_of(last), **ending
        )
        yield encode(answer)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        cursor, blocks = StreamCursor(), ContentBlockStream()
        started = False
        async with aclosing(self._chat.deltas(cursor)) as deltas:
            async for output, delta in deltas:
                if not started:
                    started = True
                    empty = MessageResponse(id=self._id, model=self._chat.model, content=[], usage=usage_of(output))
                    empty.usage.output_tokens = 0
                    yield event("message_start", message=empty)
                if events := blocks.add(delta):
                    yield events
                completion = output.outputs[0]
                if completion.finished:
                    usage = msgspec.to_builtins(usage_of(output))
                    ending = stop_reason_of(completion, cursor.num_tool_calls > 0, self._max_tokens)
                    yield blocks.end() + event("message_delta", delta=ending, usage=usage)
        yield event("message_stop")


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add the routes of Anthropic's API."""
    routes.describe(SCHEMAS, SCHEMA_PREFIX)
    routes.error_formats.add(ERROR_FORMAT, "/v1/messages")

    def read(body: bytes, schema: type[T], record: RequestRecord) -> T:
        fields = read_object(body)
        check_supported(fields, UNSUPPORTED_FIELDS)
        request = convert(fields, schema, record.unknown, "pydantic")
        record.error_format = PARSED_ERROR_FORMAT
        return request

    async def create_message(raw_request: Request) -> Response:
        record = record_of(raw_request.scope)

        def answer(body: bytes) -> Response:
            request = read(body, MessagesRequest, record)
            service = served_models.find(request.model)
            handler = MessageHandler(service, record, request, len(body))
            return Reply.of(service, handler, PARSED_ERROR_FORMAT, request.stream)

        return await served_models.read(raw_request, answer, served_models.max_body_size)

    async def count_tokens(raw_request: Request) -> Response:
        record = record_of(raw_request.scope)

        def prompt_of(body: bytes) -> ChatPrompt:
            request = read(body, CountTokensRequest, record)
            service = served_models.find(request.model)
            chat = to_chat_request(request, service.template_variables, service.sees_images)
            service.adapter_of(chat.model)
            return ChatPrompt(service, chat, len(body), record)

        prompt = await served_models.read(raw_request, prompt_of, served_models.max_body_size)
        count = await prompt.count_tokens()
        return Response(encode(TokenCount(input_tokens=count)), media_type="application/json")

    add_model_routes(routes, served_models)
    for path, endpoint, request, response, summary in (
        ("/v1/messages", create_message, MessagesRequest, MessageResponse, "Anthropic's answer to a conversation"),
        ("/v1/messages/count_tokens", count_tokens, CountTokensRequest, TokenCount, "Count a conversation's tokens"),
    ):
        request_schema, response_schema = reference(request, SCHEMA_PREFIX), reference(response, SCHEMA_PREFIX)
        error_schema = reference(ErrorResponse, SCHEMA_PREFIX)
        described = operation(response_schema, error_schema, request_schema, streamed=request is MessagesRequest)
        routes.add(path, endpoint, access=Access.INFERENCE, method="POST", summary=summary, described=described)
