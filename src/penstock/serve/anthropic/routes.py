"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from penstock.core import Failure
from penstock.serve.body import convert, read_object
from penstock.serve.openai.chat import Answering as Chatting
from penstock.serve.openai.chat_prompt import ChatPrompt
from penstock.serve.record import Record, record_of
from penstock.serve.reply import Reply
from penstock.serve.service import Service
from penstock.serve.services import Services
from penstock.serve.shape import Shape
from penstock.serve.telling import Telling

from .answers import Blocks, MessageAnswer, TokenCount, blocks_of, encode, ending_of, error_of, event, usage_of
from .parse import chat_of
from .schema import Counted, MessagesRequest

T = TypeVar("T", bound=msgspec.Struct)


class AnthropicShape(Shape):
    def error(self, failure: Failure) -> bytes:
        return encode(error_of(failure))

    def late_error(self, failure: Failure) -> bytes:
        told = msgspec.to_builtins(error_of(failure))
        return event("error", error=told["error"])


SHAPE = AnthropicShape()


class Answering:
    """One request, from its messages to a message."""

    def __init__(self, service: Service, record: Record, request: MessagesRequest, size: int) -> None:
        self._chat = Chatting(service, record, chat_of(request, _variables(service)), size)
        self._id = f"msg_{record.request_id}"
        self._model = service.adapter_of(request.model) or service.name

    async def whole(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._chat.outputs()) as outputs:
            async for output in outputs:
                last = output
        made = last.outputs[0]
        message = self._chat.message(made)
        ending = ending_of(made, bool(message.tool_calls))
        answer = MessageAnswer(
            id=self._id, model=self._model, content=blocks_of(message), usage=usage_of(last), **ending
        )
        yield encode(answer)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        telling, blocks = Telling(), Blocks()
        begun = False
        async with aclosing(self._chat.outputs()) as outputs:
            async for output in outputs:
                if not begun:
                    begun = True
                    empty = MessageAnswer(id=self._id, model=self._model, content=[], usage=usage_of(output))
                    empty.usage.output_tokens = 0
                    yield event("message_start", message=empty)
                made = output.outputs[0]
                if telling.progress.advance(made) is None:
                    continue
                if events := blocks.tell(telling.news(self._chat.message(made))):
                    yield events
                if made.finished:
                    usage = msgspec.to_builtins(usage_of(output))
                    yield blocks.end() + event("message_delta", delta=ending_of(made, telling.calls > 0), usage=usage)
        yield event("message_stop")


def add_routes(app: FastAPI, services: Services) -> None:
    """What Anthropic's clients call."""

    async def read(request: Request, schema: type[T]) -> tuple[T, int]:
        body = await services.read(request)
        return convert(read_object(body), schema), len(body)

    async def create_message(request: Request) -> Response:
        wanted, size = await read(request, MessagesRequest)
        service = services.find(wanted.model)
        answering = Answering(service, record_of(request.scope), wanted, size)
        streamed = bool(wanted.stream)
        return Reply(service, answering.stream() if streamed else answering.whole(), SHAPE, streamed)

    async def count_tokens(request: Request) -> Response:
        wanted, size = await read(request, Counted)
        service = services.find(wanted.model)
        prompt: Any = await ChatPrompt(service, chat_of(wanted, _variables(service)), size).prompt()
        return Response(encode(TokenCount(input_tokens=len(prompt["prompt_token_ids"]))), media_type="application/json")

    for path, endpoint in (("/v1/messages", create_message), ("/v1/messages/count_tokens", count_tokens)):
        app.add_api_route(path, endpoint, methods=["POST"], include_in_schema=False, response_class=Response)


def _variables(service: Service) -> frozenset[str]:
    return service.gateway.preparer.tokenizer.template.variables
