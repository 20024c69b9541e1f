"""Handler of OpenAI's ``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.frontend.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from penstock.serve.chat.generation import CallDelta, ChatGeneration
from penstock.serve.chat.request import ChatRequest, NamedTool
from penstock.serve.generation import likeliest
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel
from penstock.text import TextPart, ToolCall

from .choices import ChoiceHandler
from .schema import (
    MIN_LOGPROB,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    FunctionDelta,
    ResponseFunctionCall,
    ResponseToolCall,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    encode_in_chunks,
    prompt_logprobs_of,
    token_of,
)

Reason = Literal["stop", "length", "tool_calls"] | None


class ChatHandler(ChoiceHandler, ChatGeneration):
    """Handler of one chat request."""

    request: ChatRequest
    top_logprob = TopLogprob
    """Struct class of the entries of ``top_logprobs``."""

    def __init__(self, service: ServedModel, record: RequestRecord, request: ChatRequest, size: int) -> None:
        super().__init__(service, record, request, size)
        self._vocabulary = service.gateway.input_processor.tokenizer.vocabulary
        self._byte_lists: dict[int, list[int]] = {}
        """Token id → bytes of the token as a list: a cache for logprobs."""
        self._has_begun = False
        """True after the first event of the stream."""
        self.id = f"chatcmpl-{record.request_id}"
        self.created = int(time.time())

    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> msgspec.Struct:
        return await self.full_choice(output, completion)

    async def chunks(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Sequence[msgspec.Struct]:
        chunks, with_ids = [], self.request.return_token_ids
        if completion.index not in self.cursors:
            chunks.append(ChunkChoice(index=completion.index, delta=ChatDelta(role="assistant", content="")))
            if with_ids:
                chunks[0].token_ids = []
            if self.prompt.echoed:
                chunks.append(ChunkChoice(index=completion.index, delta=ChatDelta(content=self.prompt.echoed)))
        chunks += self.delta_choices(completion)
        for chunk in chunks:
            if chunk.delta == ChatDelta():
                chunk.delta.content = ""  # not null, as in vLLM: example clients print the content unchecked
            if with_ids:
                chunk.delta.completion_token_ids = chunk.token_ids
        return chunks

    def response(self, choices: Any, usage: Any) -> msgspec.Struct:
        return ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    async def chunk(self, choice: Any, output: RequestOutput) -> msgspec.Struct:
        answer = await super().chunk(choice, output)
        if not self._has_begun:
            self._has_begun = True
            await self.add_prompt(answer, output)
        return answer

    async def document(self, choices: Any, outputs: list[RequestOutput]) -> msgspec.Struct:
        answer = ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage(outputs)
        )
        await self.add_prompt(answer, outputs[0])
        return answer

    def delta_choices(self, completion: CompletionOutput) -> list[ChunkChoice]:
        """The choices of one step, as OpenAI sends them: one per message part, and one with the finish reason.

        Logprobs and token ids of the step are in the first choice.
        """
        cursor = self.cursors[completion.index]
        new = cursor.advance(completion)
        if new is None:
            return []
        with_ids, positions = bool(self.request.return_token_ids), new.positions
        if self.sampling.logprobs is None:
            positions = []
        deltas = [_delta(part) for part in cursor.delta(self.message(completion))]
        if not deltas and (positions or (with_ids and new.token_ids)):
            deltas.append(ChatDelta())
        if completion.finished:
            if self.cuts_call(completion) and self.message(completion).cut_call:
                deltas.append(_incomplete(cursor.num_tool_calls - 1))
            deltas.append(ChatDelta())
        chunks = [ChunkChoice(index=completion.index, delta=delta) for delta in deltas]
        if positions:
            chunks[0].logprobs = self._logprobs(positions)
        if with_ids:
            for i, chunk in enumerate(chunks):
                chunk.token_ids = new.token_ids if i == 0 else []
        if completion.finished:
            chunks[-1].finish_reason = self._reason(completion, cursor.num_tool_calls > 0)
            chunks[-1].stop_reason = completion.stop_reason
        return chunks

    async def full_choice(self, output: RequestOutput, completion: CompletionOutput) -> ChatChoice:
        """The choice of a finished sequence."""
        parsed = self.message(completion)
        no_content = not parsed.content and bool(parsed.tool_calls or parsed.reasoning_content)
        message = ChatMessage(content=self.prompt.echoed or None if no_content else self.prompt.echoed + parsed.content)
        if parsed.reasoning_content:
            message.reasoning = message.reasoning_content = parsed.reasoning_content
        if parsed.tool_calls:
            message.tool_calls = [_call(call) for call in parsed.tool_calls]
            if self.cuts_call(completion) and parsed.cut_call:
                message.tool_calls[-1].status = "incomplete"
        choice = ChatChoice(
            index=completion.index,
            message=message,
            finish_reason=self._reason(completion, bool(parsed.tool_calls)),
            stop_reason=completion.stop_reason,
        )
        if completion.logprobs is not None:
            fair_queue = self.service.gateway.fair_queue
            await fair_queue.wait_turn()
            choice.logprobs = ChatLogprobs(
                content=await encode_in_chunks(completion.logprobs, self._position, fair_queue)
            )
        if self.request.return_token_ids:
            choice.token_ids = message.completion_token_ids = completion.token_ids
            message.prompt_token_ids = output.prompt_token_ids
        return choice

    def _reason(self, completion: CompletionOutput, called: bool) -> Reason:
        """OpenAI's ``finish_reason``; after tool calls, ``tool_calls``, or ``stop`` if ``tool_choice`` names a tool;
        ``length`` if a stop string cut off a call."""
        if completion.finish_reason == "stop" and not self.cuts_call(completion):
            return "tool_calls" if called and not isinstance(self.request.tool_choice, NamedTool) else "stop"
        return "length"

    async def add_prompt(self, answer: msgspec.Struct, output: RequestOutput) -> None:
        """Add the requested fields about the prompt to a response, or to the first chunk of a stream."""
        assert isinstance(answer, ChatCompletion | ChatCompletionChunk)
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = await prompt_logprobs_of(output, self.service.gateway.fair_queue)
        if self.request.return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
            if isinstance(answer, ChatCompletionChunk):
                answer.choices[0].delta.prompt_token_ids = output.prompt_token_ids
        if self.request.return_prompt_text:
            answer.prompt_text = output.prompt

    def _logprobs(self, positions: list[PositionLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._position(position) for position in positions])

    def _position(self, position: PositionLogprobs) -> TokenLogprob:
        sampled = self._token(*next(iter(position.items())))
        top = [self._token(*entry) for entry in likeliest(position, self.sampling.logprobs or 0)]
        return TokenLogprob(token=sampled.token, logprob=sampled.logprob, bytes=sampled.bytes, top_logprobs=top)

    def _token(self, token_id: int, logprob: Logprob) -> TopLogprob:
        name = token_of(token_id, logprob, self.request.return_tokens_as_token_ids)
        return self.top_logprob(token=name, logprob=max(logprob.logprob, MIN_LOGPROB), bytes=self._bytes(token_id))

    def _bytes(self, token_id: int) -> list[int]:
        if (token_bytes := self._byte_lists.get(token_id)) is None:
            token_bytes = list(self._vocabulary[token_id]) if token_id < len(self._vocabulary) else []
            self._byte_lists[token_id] = token_bytes
        return token_bytes


def _delta(part: TextPart | CallDelta) -> ChatDelta:
    if isinstance(part, CallDelta):
        return ChatDelta(tool_calls=[_call_delta(part)])
    if part.kind == "reasoning":
        return ChatDelta(reasoning=part.text, reasoning_content=part.text)
    return ChatDelta(content=part.text)


def _call_delta(part: CallDelta) -> ToolCallDelta:
    if not part.id:
        return ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.arguments))
    function = FunctionDelta(name=part.name, arguments=part.arguments)
    return ToolCallDelta(index=part.index, id=part.id, type="function", function=function)


def _incomplete(index: int) -> ChatDelta:
    """Delta that marks a tool call as cut off."""
    return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=""), status="incomplete")])


def _call(call: ToolCall) -> ResponseToolCall:
    function = ResponseFunctionCall(name=call.name, arguments=call.arguments)
    return ResponseToolCall(id=call.id, function=function)
