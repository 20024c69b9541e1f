"""The handler of PaddleNLP's requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from msgspec import UNSET

from penstock.core import Code, FinishReason, PenstockError
from penstock.core.errors import invalid
from penstock.frontend.outputs import RequestOutput
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.chat.messages import messages_of
from penstock.serve.generation import SequenceCursor, generate
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService

from .requests import DEFAULT_TIMEOUT, Request, field_value, sampling_of
from .responses import FullResponse, StreamChunk, Usage, encode, line


class PaddleNLPHandler:
    """One request, over HTTP or gRPC.

    Args:
        size: of the request, about as many characters.

    Raises ``PenstockError`` where it is wrong.
    """

    def __init__(self, service: ModelService, record: RequestRecord, request: Request, size: int) -> None:
        self._service = service
        self._record = record
        self._request = request
        self._size = size
        self._sampling = sampling_of(request)
        self._messages = messages_of(request.messages or [])
        has_template = bool(service.gateway.input_processor.tokenizer.template_source)
        if request.text is not None and service.options.template_text and has_template:
            self._messages = [{"role": "user", "content": request.text}]
        if request.system is not None:
            if not self._messages:
                given = "input_ids" if request.text is None else "text that is not put into the chat template"
                raise invalid("system", f"cannot be combined with {given}")
            self._messages.insert(0, {"role": "system", "content": request.system})
        self._adapter = request.model if request.model in service.gateway.engine_pool.adapters else None
        self._req_id = request.req_id or uuid4().hex
        record.facts["req_id"] = self._req_id

    async def pieces(self) -> AsyncGenerator[StreamChunk, None]:
        """The answer as it comes; the last piece has ``is_end`` 1. Raises ``PenstockError`` where it fails."""
        request, progress, count = self._request, SequenceCursor(), 0
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                if request.return_all_tokens and not completion.finished:
                    continue
                if (new := progress.advance(completion)) is None:
                    continue
                token_ids = new.token_ids[:-1] if completion.finish_reason == FinishReason.STOP else new.token_ids
                yield StreamChunk(
                    req_id=self._req_id,
                    token=new.text,
                    token_ids=token_ids,
                    send_idx=count,
                    is_end=int(completion.finished),
                    usage=_usage(output) if completion.finished and request.return_usage else UNSET,
                )
                count += 1

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                yield line(piece)

    async def full(self) -> AsyncGenerator[bytes, None]:
        texts = []
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                texts.append(piece.token)
        text = "".join(texts)
        yield encode(FullResponse(req_id=self._req_id, tokens_all=text, result=text, usage=piece.usage))

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Raises ``PenstockError`` (``timeout``), whatever the engine does, once the client has waited too long for a
        piece of a stream or, with ``timeout``, for an answer in one piece.
        """
        request, timeout = self._request, field_value(self._request, "timeout")
        in_pieces = request.stream and not request.return_all_tokens and not self._service.options.disable_streaming
        limit = timeout or DEFAULT_TIMEOUT
        deadline = self._record.arrived + limit
        async with aclosing(self._generated()) as outputs:
            while True:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        output = await anext(outputs, None)
                except TimeoutError as error:
                    message = f"timeout: no output for {limit:g} seconds"
                    raise PenstockError(Code.TIMEOUT, message, "timeout", limit) from error
                if output is None:
                    return
                yield output
                if in_pieces or timeout is None:
                    deadline = time.monotonic() + limit

    async def _generated(self) -> AsyncGenerator[RequestOutput, None]:
        prompt = await self._prompt()
        options: dict[str, Any] = {"external_id": self._request.req_id or "", "adapter": self._adapter or ""}
        async with aclosing(generate(self._service, self._record, prompt, self._sampling, **options)) as outputs:
            async for output in outputs:
                yield output

    async def _prompt(self) -> TokenizedPrompt:
        """The prompt in token ids; refused where prompt and ``max_dec_len`` exceed the context."""
        request, gateway = self._request, self._service.gateway
        if self._messages:
            prompt = await gateway.chat_prompt(self._messages, self._size, {}, client=self._record.sender)
        elif request.text is not None:
            prompt = TokenizedPrompt(await gateway.encode(request.text), request.text)
        else:
            prompt = TokenizedPrompt(request.input_ids or [])
        count, max_dec_len = len(prompt.token_ids), field_value(request, "max_dec_len") or 0
        maximum = gateway.engine_pool.require_engine().max_model_len
        if max_dec_len and count + max_dec_len > maximum:
            message = f"{count} tokens of input and {max_dec_len} of output are more than the {maximum} of the context"
            raise invalid("max_tokens", message, maximum)
        return prompt


def _usage(output: RequestOutput) -> Usage:
    prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return Usage(prompt_tokens=prompt, completion_tokens=num_output, total_tokens=prompt + num_output)
