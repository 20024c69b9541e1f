"""Generation of one chat: message deltas, and the base class of the handlers of all dialects except PaddleNLP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import msgspec

from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput
from penstock.serve.generation import GenerationHandler, Output, SequenceCursor
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel
from penstock.text import Message, MessagePart, TextPart, ToolCall

from .prompt import ChatPrompt, memory_of
from .request import ChatRequest
from .sampling import chat_sampling, constrain_calls, forced_tool_call


@dataclass(slots=True)
class CallDelta:
    """New part of a tool call."""

    index: int
    """Index of the call in its message."""
    arguments: str
    id: str = ""
    """Id of the call. Like ``name``, it is set only in the first delta of the call."""
    name: str = ""


Delta = list[TextPart | CallDelta]
"""Parts added to a message, in order. If the part sent last has grown, its new text is the first item."""


class MessageCursor(SequenceCursor):
    """Tracks how much of a sequence and its message has been sent."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tool_calls = 0
        """Number of tool calls sent; the last may be sent only in part."""
        self._parts = 0
        """Number of parts sent; the last may be sent only in part."""
        self._length = 0
        """Number of characters of the last part sent."""

    def delta(self, message: Message) -> Delta:
        """Return the parts added to a message since the last call."""
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
        """Return the text added to the last part."""
        text = part.arguments if isinstance(part, ToolCall) else part.text
        added, self._length = text[self._length :], len(text)
        if not added:
            return []
        return [CallDelta(self.num_tool_calls - 1, added) if isinstance(part, ToolCall) else TextPart(part.kind, added)]


class ChatGeneration(GenerationHandler):
    """Base class of handlers of one chat request.

    Args:
        size: approximate number of characters of the request.
        keeps_body: keep the messages until the request ends.

    Raises ``PenstockError`` if the request is invalid, or not supported by this model or server.
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
        """Cursor of each sequence, by index."""
        self.call_seed = ""
        """Text from which the ids of tool calls are derived; empty: random ids."""
        if (constraint := forced_tool_call(request, self.prompt.tools)) is not None:
            if sampling.guided_decoding:
                message = "cannot be combined with another constraint on the output: remove one of them"
                raise invalid("tool_choice", message)
            self.sampling = sampling.replace(guided_decoding=constraint)
        else:
            strictness = service.gateway.input_processor.tool_strictness
            self.sampling, record.tool_levels = constrain_calls(request, sampling, self.prompt.formats, strictness)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        prompt = await self.prompt.prompt()
        if not self._keeps_body:  # do not keep base64 images while the answer is generated
            self.request.messages = []
            self.record.shrink_memory(memory_of(prompt))
        if self.call_seed and prompt.parser_config:
            config = replace(prompt.parser_config, id_seed=self.call_seed)
            prompt = msgspec.structs.replace(prompt, parser_config=config)
        return self.generate(prompt)

    def delta(self, completion: CompletionOutput) -> Delta:
        """Return the parts added to a sequence's message since the last call."""
        cursor = self.cursors[completion.index]
        return cursor.delta(self.message(completion)) if cursor.advance(completion) else []

    def cuts_call(self, completion: CompletionOutput) -> bool:
        """True if a finished sequence was cut off within a tool call, by a limit on its length, a stop string or a stop
        token. Answers report it; the arguments are not sent as if they were complete."""
        is_cut = completion.finish_reason == "length" or completion.stop_reason is not None
        return is_cut and self.message(completion).has_cut_call

    def message(self, completion: CompletionOutput) -> Message:
        """Return a sequence's message: without reasoning if ``include_reasoning`` is false, without calls if
        ``tool_choice`` is none, and with only the first call if ``parallel_tool_calls`` is false."""
        parsed, request = completion.message, self.request
        assert parsed is not None
        with_reasoning, max_calls = request.include_reasoning is not False, len(parsed.parts)
        if request.tool_choice == "none":
            max_calls = 0
        elif request.parallel_tool_calls is False:
            max_calls = 1
        if with_reasoning and max_calls == len(parsed.parts):
            return parsed
        message = Message(has_cut_head=parsed.has_cut_head and max_calls > len(parsed.tool_calls))
        for part in parsed.parts:
            if isinstance(part, ToolCall):
                if max_calls:
                    message.parts.append(part)
                    max_calls -= 1
            elif with_reasoning or part.kind == "content":
                message.add_text(part.kind, part.text)
        return message
