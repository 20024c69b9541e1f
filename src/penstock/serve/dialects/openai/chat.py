"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from msgspec import UNSET, UnsetType

from penstock.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from penstock.serve.chat.generation import ChatGeneration
from penstock.serve.chat.request import ChatRequest, NamedTool
from penstock.serve.chat.stream_cursor import CallDelta, StreamCursor
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService
from penstock.text import Message, TextPart, ToolCall

from .responses import (
    DONE,
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
    Usage,
    encode,
    encode_in_pieces,
    event,
    prompt_logprobs_of,
    token_of,
    usage_of,
)

Reason = Literal["stop", "length", "tool_calls"] | None


class ChatHandler:
    """One request, from its messages to its choices."""

    top_logprob = TopLogprob
    """Schema of alternatives in logprobs."""

    def __init__(self, service: ModelService, record: RequestRecord, request: ChatRequest, size: int) -> None:
        self._service = service
        self._request = request
        self._chat = ChatGeneration(service, record, request, size)
        self.sampling = self._chat.sampling
        self._vocabulary = service.gateway.input_processor.tokenizer.vocabulary
        self._byte_lists: dict[int, list[int]] = {}
        """Cache of token id → bytes as a list of integers, for logprobs."""
        self.id = f"chatcmpl-{record.request_id}"
        self._created = int(time.time())

    @property
    def model(self) -> str:
        """Name of the model or adapter that answers."""
        return self._chat.model

    @property
    def echoed(self) -> str:
        """Text of the last message with which the answer begins (``echo``)."""
        return self._chat.prompt.echoed

    def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        return self._chat.outputs()

    def message(self, completion: CompletionOutput) -> Message:
        """A sequence's message, as ``ChatGeneration.message``."""
        return self._chat.message(completion)

    async def full(self) -> AsyncGenerator[bytes, None]:
        last = await self._chat.final()
        answer = ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._chat.model,
            choices=[await self.choice(completion, last.prompt_token_ids) for completion in last.outputs],
            usage=usage_of([last]),
        )
        await self._add_prompt(answer, last)
        yield encode(answer)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        given = self._request.stream_options
        with_usage = given and given.include_usage
        always = with_usage and given and given.continuous_usage_stats
        cursor: dict[int, StreamCursor] = {}
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                begins, events = not cursor, []
                usage = usage_of([output]) if always else None if with_usage else UNSET
                for completion in output.outputs:
                    chunks = []
                    if completion.index not in cursor:
                        cursor[completion.index] = StreamCursor()
                        chunks.append(
                            ChunkChoice(index=completion.index, delta=ChatDelta(role="assistant", content=""))
                        )
                        if self._request.return_token_ids:
                            chunks[0].token_ids = []
                        if self._chat.prompt.echoed:
                            echoed = ChatDelta(content=self._chat.prompt.echoed)
                            chunks.append(ChunkChoice(index=completion.index, delta=echoed))
                    chunks += self.added(completion, cursor[completion.index])
                    for chunk in chunks:
                        if chunk.delta == ChatDelta():
                            chunk.delta.content = (
                                ""  # as vLLM has it: documents print what comes, and none would be null
                            )
                        if self._request.return_token_ids:
                            chunk.delta.completion_token_ids = chunk.token_ids
                            if begins:
                                chunk.delta.prompt_token_ids = output.prompt_token_ids
                        answer = self._chunk([chunk], usage)
                        if begins:
                            await self._add_prompt(answer, output)
                        events.append(event(answer))
                        begins = False
                if events:
                    yield b"".join(events)
        if with_usage:
            yield event(self._chunk([], usage_of([output])))
        yield DONE

    def added(self, completion: CompletionOutput, cursor: StreamCursor) -> list[ChunkChoice]:
        """The chunks of what a step added to a sequence: one for each part, and one that ends it, as OpenAI sends them.

        Logprobs and token ids of the step are in the first one.
        """
        piece = cursor.progress.advance(completion)
        if piece is None:
            return []
        with_ids, positions = bool(self._request.return_token_ids), piece.positions
        if self.sampling.logprobs is None:
            positions = []
        deltas = [_delta(part) for part in cursor.delta(self._chat.message(completion))]
        if not deltas and (positions or (with_ids and piece.token_ids)):
            deltas.append(ChatDelta())
        if completion.finished:
            deltas.append(ChatDelta())
        chunks = [ChunkChoice(index=completion.index, delta=delta) for delta in deltas]
        if positions:
            chunks[0].logprobs = self._logprobs(positions)
        if with_ids:
            for i, chunk in enumerate(chunks):
                chunk.token_ids = piece.token_ids if i == 0 else []
        if completion.finished:
            chunks[-1].finish_reason = self._reason(completion, cursor.num_tool_calls > 0)
            chunks[-1].stop_reason = completion.stop_reason
        return chunks

    async def choice(self, completion: CompletionOutput, prompt_token_ids: list[int]) -> ChatChoice:
        read = self._chat.message(completion)
        only_else = not read.content and bool(read.tool_calls or read.reasoning_content)
        message = ChatMessage(
            content=self._chat.prompt.echoed or None if only_else else self._chat.prompt.echoed + read.content
        )
        if read.reasoning_content:
            message.reasoning = message.reasoning_content = read.reasoning_content
        if read.tool_calls:
            message.tool_calls = [_call(call) for call in read.tool_calls]
        choice = ChatChoice(
            index=completion.index,
            message=message,
            finish_reason=self._reason(completion, bool(read.tool_calls)),
            stop_reason=completion.stop_reason,
        )
        if completion.logprobs is not None:
            fair_queue = self._service.gateway.fair_queue
            await fair_queue.wait_turn()
            choice.logprobs = ChatLogprobs(
                content=await encode_in_pieces(completion.logprobs, self._position, fair_queue)
            )
        if self._request.return_token_ids:
            choice.token_ids = message.completion_token_ids = completion.token_ids
            message.prompt_token_ids = prompt_token_ids
        return choice

    def _reason(self, completion: CompletionOutput, called: bool) -> Reason:
        """``finish_reason`` as in OpenAI's API: ``stop`` where ``tool_choice`` named the tool."""
        if completion.finish_reason == "stop":
            return "tool_calls" if called and not isinstance(self._request.tool_choice, NamedTool) else "stop"
        return "length"

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, created=self._created, model=self._chat.model, choices=choices, usage=usage
        )

    async def _add_prompt(self, answer: ChatCompletion | ChatCompletionChunk, output: RequestOutput) -> None:
        """Add the requested fields of the prompt; in a stream to the first chunk."""
        answer.prompt_logprobs = await prompt_logprobs_of(output, self._service.gateway.fair_queue)
        if self._request.return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        if self._request.return_prompt_text:
            answer.prompt_text = output.prompt

    def _logprobs(self, positions: list[PositionLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._position(position) for position in positions])

    def _position(self, position: PositionLogprobs) -> TokenLogprob:
        as_ids = self._request.return_tokens_as_token_ids
        entries = [
            (
                p.rank,
                self.top_logprob(
                    token=token_of(token_id, p, as_ids),
                    logprob=max(p.logprob, MIN_LOGPROB),
                    bytes=self._bytes(token_id),
                ),
            )
            for token_id, p in position.items()
        ]
        sampled, maximum = entries[0][1], self.sampling.logprobs or 0
        top = [top_logprob for rank, top_logprob in sorted(entries, key=lambda entry: entry[0]) if rank <= maximum]
        return TokenLogprob(token=sampled.token, logprob=sampled.logprob, bytes=sampled.bytes, top_logprobs=top)

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


def _call(call: ToolCall) -> ResponseToolCall:
    function = ResponseFunctionCall(name=call.name, arguments=call.arguments)
    return ResponseToolCall(id=call.id, function=function)
