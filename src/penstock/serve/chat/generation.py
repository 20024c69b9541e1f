"""Generation of one chat: base of the handlers of all dialects but PaddleNLP, and deltas of a message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput
from penstock.serve.generation import GenerationHandler, Output, SequenceCursor
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel
from penstock.text import Message, MessagePart, TextPart, ToolCall

from .prompt import ChatPrompt, memory_of
from .request import ChatRequest
from .sampling import chat_sampling, forced_tool_call


@dataclass(slots=True)
class CallDelta:
    """What was added to a tool call."""

    index: int
    """Index of the call in its message."""
    arguments: str
    id: str = ""
    name: str = ""
    """Id and name are set in the first delta of a call."""


Delta = list[TextPart | CallDelta]
"""Parts added to a message, in order. A text that goes on and the arguments of a call that goes on come first."""


class MessageCursor(SequenceCursor):
    """The position in a sequence and its message up to which they have been sent."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tool_calls = 0
        """Number of tool calls that were sent, the last one perhaps in part."""
        self._parts = 0
        """Number of parts that were sent, the last one perhaps in part."""
        self._length = 0
        """Characters of the last part that were sent."""

    def delta(self, message: Message) -> Delta:
        """What was added to a message since the last call."""
        delta: Delta = []
        if self._parts:
            delta += self._rest(message.parts[self._parts - 1])
        for part in message.parts[self._parts :]:
            self._parts, self._length = self._parts + 1, 0
            if isinstance(part, ToolCall):
                delta.append(CallDelta(self.num_tool_calls, part.arguments, part.id, part.name))
                self.num_tool_calls += 1
                self._length = len(part.arguments)
            else:
                delta += self._rest(part)
        return delta

    def _rest(self, part: MessagePart) -> Delta:
        """Text added to the last part."""
        text = part.arguments if isinstance(part, ToolCall) else part.text
        added, self._length = text[self._length :], len(text)
        if not added:
            return []
        return [CallDelta(self.num_tool_calls - 1, added) if isinstance(part, ToolCall) else TextPart(part.kind, added)]


class ChatGeneration(GenerationHandler):
    """One chat, from its request to its outputs.

    Args:
        size: about how many characters the request has.
        keeps_body: whether what the body has is kept until the request ends.

    Raises ``PenstockError`` where the request is wrong, or asks for what this model or server does not support.
    """

    def __init__(
        self, service: ServedModel, record: RequestRecord, request: ChatRequest, size: int, keeps_body: bool = False
    ) -> None:
        sampling = chat_sampling(request, service.gateway.input_processor.default_sampling)
        super().__init__(service, record, request, sampling)
        self._keeps_body = keeps_body
        self.request = request
        self.prompt = ChatPrompt(service, request, size, record)
        self.cursors: defaultdict[int, MessageCursor] = defaultdict(MessageCursor)
        """How far the answer has been formatted, by the sequence's index."""
        if (constraint := forced_tool_call(request, self.prompt.tools)) is not None:
            if sampling.guided_decoding:
                raise invalid("tool_choice", "cannot be combined with another constraint on the answer")
            self.sampling = sampling.replace(guided_decoding=constraint)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        prompt = await self.prompt.prompt()
        if not self._keeps_body:  # images in base64 are not kept while the answer is generated
            self.request.messages = []
            self.record.shrink_memory(memory_of(prompt))
        return self.generate(prompt)

    def delta(self, completion: CompletionOutput) -> Delta:
        """What was added to a sequence's message since the last call."""
        cursor = self.cursors[completion.index]
        return cursor.delta(self.message(completion)) if cursor.advance(completion) else []

    def message(self, completion: CompletionOutput) -> Message:
        """A sequence's message: without reasoning where ``include_reasoning`` is false, without calls where
        ``tool_choice`` is none, and with the first call alone where ``parallel_tool_calls`` is false."""
        read, request = completion.message, self.request
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
