"""PaddleNLP's requests, on the paths of OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal
from uuid import uuid4

from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.core import Code, FinishReason, PenstockError
from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.chat.messages import messages_of
from penstock.serve.chat.request import ChatRequest
from penstock.serve.dialects.dispatch import CHATS, COMPLETIONS, SharedPathDialect
from penstock.serve.generation import GenerationHandler, Output, SequenceCursor
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.reply import Reply, encode
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.models.served_models import ServedModel, ServedModels

from .schema import (
    DEFAULT_TIMEOUT,
    PADDLENLP_FIELDS,
    SELECTING_FIELDS,
    FullResponse,
    PaddleNLPErrorFormat,
    Request,
    StreamChunk,
    Usage,
    field_value,
    parse,
    sampling_of,
)

NAME = "paddlenlp"
"""Name of the compatibility profile (``--compat``)."""
PROMPTS = frozenset(("prompt", "prompt_token_ids"))
"""Prompt fields of OpenAI's completion requests."""


class PaddleNLPHandler(GenerationHandler):
    """Handler of one request, over HTTP or gRPC.

    Args:
        size: approximate number of characters of the request.

    Raises ``PenstockError`` if the request is invalid.
    """

    def __init__(self, service: ServedModel, record: RequestRecord, request: Request, size: int) -> None:
        adapter = request.model if request.model in service.gateway.engine_pool.adapters else None
        super().__init__(service, record, ChatRequest(messages=[], model=adapter), sampling_of(request))
        self._request = request
        self._size = size
        self._limit = field_value(request, "timeout") or DEFAULT_TIMEOUT
        self._deadline = record.arrived + self._limit
        self._cursor = SequenceCursor()
        self._num_chunks = 0
        self._messages = messages_of(request.messages or [])
        has_template = bool(service.gateway.input_processor.tokenizer.template_source)
        if request.text is not None and service.options.template_text and has_template:
            self._messages = [{"role": "user", "content": request.text}]
        if request.system is not None:
            if not self._messages:
                other = "input_ids" if request.text is None else "text that is not rendered with the chat template"
                raise invalid("system", f"cannot be combined with {other}; use messages")
            self._messages.insert(0, {"role": "system", "content": request.system})
        self._req_id = request.req_id or uuid4().hex
        record.log_fields["req_id"] = self._req_id

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        completion, usage = outputs[0].outputs[0], self._usage(outputs[0])
        text, reason = completion.text, _reason(completion)
        return encode(
            FullResponse(req_id=self._req_id, tokens_all=text, result=text, finish_reason=reason, usage=usage)
        )

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        chunk = self.chunk(output)
        return encode(chunk) + b"\n" if chunk else b""

    def chunk(self, output: RequestOutput) -> StreamChunk | None:
        """The chunk of a step; None if the step has no output to send. The last chunk has ``is_end`` 1."""
        completion = output.outputs[0]
        if self._request.return_all_tokens and not completion.finished:
            return None
        if (delta := self._cursor.advance(completion)) is None:
            return None
        self._num_chunks += 1
        return StreamChunk(
            req_id=self._req_id,
            token=delta.text,
            token_ids=delta.token_ids[:-1] if completion.finish_reason == FinishReason.STOP else delta.token_ids,
            send_idx=self._num_chunks - 1,
            is_end=int(completion.finished),
            finish_reason=_reason(completion),
            usage=self._usage(output) if completion.finished else UNSET,
        )

    def _usage(self, output: RequestOutput) -> Usage | UnsetType:
        if not self._request.return_usage:
            return UNSET
        prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        return Usage(prompt_tokens=prompt, completion_tokens=num_output, total_tokens=prompt + num_output)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        async with self._before_deadline():
            prompt = await self._prompt()
        return self._with_deadline(self.generate(prompt, external_id=self._request.req_id or ""))

    async def _with_deadline(self, stream: AsyncGenerator[Output, None]) -> AsyncGenerator[Output, None]:
        """Yield the outputs of ``stream``. Raises ``PenstockError`` (``timeout``) if the next chunk of a stream, or a
        full response with ``timeout``, takes too long, even if the engine hangs."""
        request = self._request
        in_chunks = request.stream and not request.return_all_tokens and not self.service.options.disable_streaming
        async with aclosing(stream):
            while True:
                async with self._before_deadline():
                    output = await anext(stream, None)
                if output is None:
                    return
                yield output
                if in_chunks or field_value(request, "timeout") is None:
                    self._deadline = time.monotonic() + self._limit

    @asynccontextmanager
    async def _before_deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                yield
        except TimeoutError as error:
            message = f"timeout: no output for {self._limit:g} seconds; retry, or send a longer timeout"
            raise PenstockError(Code.TIMEOUT, message, "timeout", self._limit) from error

    async def _prompt(self) -> TokenizedPrompt:
        """Tokenize the prompt. Raises ``PenstockError`` (``invalid``) if less than ``max_dec_len`` tokens remain."""
        request, gateway = self._request, self.service.gateway
        if self._messages:
            prompt = await gateway.chat_prompt(self._messages, self._size, {}, client=self.record.sender)
        elif request.text is not None:
            prompt = TokenizedPrompt(await gateway.encode(request.text), request.text)
        else:
            prompt = TokenizedPrompt(request.input_ids or [])
        count, max_dec_len = len(prompt.token_ids), field_value(request, "max_dec_len") or 0
        maximum = self.max_model_len
        if max_dec_len and count + max_dec_len > maximum:
            message = f"{count} input tokens and {max_dec_len} output tokens exceed the context length of {maximum}"
            raise invalid("max_tokens", message, maximum)
        return prompt


def _reason(completion: CompletionOutput) -> Literal["length"] | UnsetType:
    return "length" if completion.finish_reason == FinishReason.LENGTH else UNSET


class PaddleNLP(SharedPathDialect):
    """PaddleNLP's dialect. It is selected by a field that only PaddleNLP has, unless the request is a complete OpenAI
    request (prompt, or messages and model): OpenAI clients that send extra fields always get an OpenAI response. With
    ``--compat paddlenlp``, requests without a model select it, too."""

    error_format = PaddleNLPErrorFormat()

    def __init__(self, served_models: ServedModels) -> None:
        self._served_models = served_models
        self._preferred = served_models.options.compat == NAME
        self.fields = None if self._preferred else PADDLENLP_FIELDS

    def matches(self, raw_request: HttpRequest, fields: dict[str, Any]) -> bool:
        if not PROMPTS.isdisjoint(fields) or fields.keys() >= {"model", "messages"}:
            return False
        dialect_fields = SELECTING_FIELDS if "messages" in fields else PADDLENLP_FIELDS
        return not dialect_fields.isdisjoint(fields) or (self._preferred and "model" not in fields)

    def error_format_of(self, scope: Scope) -> ErrorFormat | None:
        """The error format of a request that is not parsed yet: PaddleNLP's with ``--compat paddlenlp``, or None."""
        return self.error_format if self._preferred and scope["path"] in (*COMPLETIONS, *CHATS) else None

    def completion(self, raw_request: HttpRequest, fields: dict[str, Any], size: int) -> Response:
        record = record_of(raw_request.scope)
        error_format = record.error_format = PaddleNLPErrorFormat.of(fields)
        request = parse(fields, record.unknown)
        service = self._served_models.find_or_first(request.model)
        return Reply.of(service, PaddleNLPHandler(service, record, request, size), error_format, request.stream)

    chat = completion
