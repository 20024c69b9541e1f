"""Generation of one chat, used by the handlers of all dialects but PaddleNLP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.generation import generate
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService
from penstock.text import Message, ToolCall

from .prompt import ChatPrompt, memory_of
from .request import ChatRequest
from .sampling import chat_sampling
from .stream_cursor import Delta, StreamCursor
from .structured_outputs import forced_tool_call


class ChatGeneration:
    """One chat, from its request to its outputs.

    Args:
        size: about how many characters the request has.
        keeps_body: whether what the body has is kept until the request ends.

    Raises ``PenstockError`` where the request is wrong, or asks for what this model or server does not support.
    """

    def __init__(
        self, service: ModelService, record: RequestRecord, request: ChatRequest, size: int, keeps_body: bool = False
    ) -> None:
        self._service = service
        self._record = record
        self._keeps_body = keeps_body
        self._request = request
        self._adapter = service.adapter_of(request.model)
        self.model = self._adapter or service.name
        """The model's name in the answer: the adapter's, or else the base model's."""
        self.sampling = chat_sampling(request, service.gateway.input_processor.default_sampling)
        self.prompt = ChatPrompt(service, request, size, record)
        if (constraint := forced_tool_call(request, self.prompt.tools)) is not None:
            if self.sampling.guided_decoding:
                raise invalid("tool_choice", "cannot be combined with another constraint on the answer")
            self.sampling = self.sampling.replace(guided_decoding=constraint)

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """The output so far, after every step."""
        request = self._request
        prompt = await self.prompt.prompt()
        if not self._keeps_body:  # images in base64 are not kept while the answer is generated
            request.messages = []
            self._record.shrink_memory(memory_of(prompt))
        options = {"priority": request.priority or 0, "cache_salt": request.cache_salt or "", "adapter": self._adapter}
        stream = generate(self._service, self._record, prompt, self.sampling, **options)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    async def final(self) -> RequestOutput:
        """The finished output."""
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                last = output
        return last

    async def deltas(self, cursor: StreamCursor) -> AsyncGenerator[tuple[RequestOutput, Delta], None]:
        """The output after every step, and what the step added to the first sequence's message."""
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                advanced = cursor.progress.advance(completion) is not None
                yield output, cursor.delta(self.message(completion)) if advanced else []

    def message(self, completion: CompletionOutput) -> Message:
        """A sequence's message: without reasoning where ``include_reasoning`` is false, without calls where
        ``tool_choice`` is none, and with the first call alone where ``parallel_tool_calls`` is false."""
        read, request = completion.message, self._request
        assert read is not None
        with_reasoning, max_calls = request.include_reasoning is not False, len(read.parts)
        if request.tool_choice == "none":
            max_calls = 0
        elif request.parallel_tool_calls is False:
            max_calls = 1
        if with_reasoning and max_calls == len(read.parts):
            return read
        message = Message()
        for part in read.parts:
            if isinstance(part, ToolCall):
                if max_calls:
                    message.parts.append(part)
                    max_calls -= 1
            elif with_reasoning or part.kind == "content":
                message.add_text(part.kind, part.text)
        return message
