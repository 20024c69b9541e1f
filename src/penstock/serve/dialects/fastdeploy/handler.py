"""Formats the choices of OpenAI's handlers as FastDeploy's answers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from msgspec import UNSET, UnsetType

from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.chat.request import ChatRequest, GenerationRequest
from penstock.serve.chat.stream_cursor import StreamCursor
from penstock.serve.generation import SequenceCursor
from penstock.serve.models.service import ModelService

from ..openai.chat import ChatHandler
from ..openai.completions import CompletionHandler
from ..openai.requests import CompletionRequest
from ..openai.responses import DONE, encode, event, prompt_logprobs_of
from .responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    FirstChoice,
    FirstCompletionChoice,
    FirstDelta,
    PromptLogprobs,
    TopLogprob,
    Usage,
)


class FastDeployChatHandler(ChatHandler):
    """OpenAI's handler, with FastDeploy's schema of alternatives in logprobs."""

    top_logprob = TopLogprob


class _Answer:
    """Shared parts of chats and completions."""

    def __init__(self, service: ModelService, request: GenerationRequest) -> None:
        self._service = service
        self._with_ids = bool(request.return_token_ids)
        given = request.stream_options
        self._with_usage = bool(given and given.include_usage)
        self._continuous_usage = bool(given and given.continuous_usage_stats)
        self._created = int(time.time())

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._service.gateway.input_processor.tokenizer
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    async def _prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs:
        found = await prompt_logprobs_of(output, self._service.gateway.fair_queue)
        return None if found is UNSET else found


class FastDeployChat(_Answer):
    """One chat."""

    def __init__(self, openai: ChatHandler, service: ModelService, request: ChatRequest) -> None:
        super().__init__(service, request)
        self._openai = openai

    async def full(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._openai.outputs()) as outputs:
            async for output in outputs:
                last = output
        choices = [await self._choice(last, completion) for completion in last.outputs]
        yield encode(
            ChatCompletion(
                id=self._openai.id,
                created=self._created,
                model=self._openai.model,
                choices=choices,
                usage=self._usage(last),
            )
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        cursors: dict[int, StreamCursor] = {}
        async with aclosing(self._openai.outputs()) as outputs:
            async for output in outputs:
                events = []
                usage = Usage.of([output]) if self._continuous_usage else UNSET
                for completion in output.outputs:
                    if completion.index not in cursors:
                        cursors[completion.index] = StreamCursor()
                        events += [self._chunk([await self._first(output, completion)], usage)]
                    for choice in self._added(output, completion, cursors[completion.index]):
                        events += [self._chunk([choice], usage)]
                if events:
                    yield b"".join(events)
        if self._with_usage:
            yield self._chunk([], Usage.of([output]))
        yield DONE

    def _usage(self, output: RequestOutput) -> Usage:
        """Token counts of a whole answer. Those of images and videos are 0, and null where the model sees images, as
        they are not counted apart."""
        usage = Usage.of([output])
        counted = None if self._service.sees_images else 0
        usage.prompt_tokens_details.image_tokens = usage.prompt_tokens_details.video_tokens = counted
        return usage

    async def _choice(self, output: RequestOutput, completion: CompletionOutput) -> ChatChoice:
        choice = await self._openai.choice(completion, output.prompt_token_ids)
        read = choice.message
        message = ChatMessage(
            content=read.content,
            reasoning_content=read.reasoning_content or None,
            tool_calls=read.tool_calls or None,
        )
        if self._with_ids:
            message.prompt_token_ids, message.prompt_tokens = output.prompt_token_ids, self._prompt_text(output)
            message.completion_token_ids, message.completion_tokens = completion.token_ids, completion.text
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=choice.logprobs,
            prompt_logprobs=await self._prompt_logprobs(output),
            finish_reason=choice.finish_reason,
        )

    async def _first(self, output: RequestOutput, completion: CompletionOutput) -> FirstChoice:
        delta = FirstDelta(content=self._openai.echoed)
        if self._with_ids:
            delta.prompt_token_ids, delta.prompt_tokens = output.prompt_token_ids, self._prompt_text(output)
        return FirstChoice(index=completion.index, delta=delta, prompt_logprobs=await self._prompt_logprobs(output))

    def _added(
        self, output: RequestOutput, completion: CompletionOutput, cursor: StreamCursor
    ) -> Iterator[ChunkChoice]:
        start = cursor.progress.text
        for choice in self._openai.added(completion, cursor):
            delta = ChatDelta(
                content=choice.delta.content or "",
                reasoning_content=choice.delta.reasoning_content or None,
                tool_calls=choice.delta.tool_calls or None,
            )
            if self._with_ids:
                delta.completion_token_ids = choice.token_ids or []
                delta.completion_tokens = completion.text[start : cursor.progress.text]
                start = cursor.progress.text
            yield ChunkChoice(
                index=choice.index,
                delta=delta,
                logprobs=choice.logprobs,
                arrival_time=_arrival(output),
                finish_reason=choice.finish_reason or UNSET,
            )

    def _chunk(self, choices: list[FirstChoice | ChunkChoice], usage: Usage | UnsetType) -> bytes:
        return event(
            ChatCompletionChunk(
                id=self._openai.id, created=self._created, model=self._openai.model, choices=choices, usage=usage
            )
        )


class FastDeployCompletions(_Answer):
    """One request for completions."""

    def __init__(self, openai: CompletionHandler, service: ModelService, request: CompletionRequest) -> None:
        super().__init__(service, request)
        self._openai = openai

    async def full(self) -> AsyncGenerator[bytes, None]:
        last: dict[int, RequestOutput] = {}
        async with aclosing(self._openai.outputs()) as outputs:
            async for i, output in outputs:
                last[i] = output
        result = [last[i] for i in sorted(last)]
        choices = [
            await self._choice(i, output, completion)
            for i, output in enumerate(result)
            for completion in output.outputs
        ]
        usage = Usage.of(result, self._openai.num_hidden_tokens)
        usage.prompt_tokens_details.image_tokens = usage.prompt_tokens_details.video_tokens = None
        yield encode(
            Completion(
                id=self._openai.id,
                created=self._created,
                model=self._openai.model,
                choices=choices,
                usage=usage,
            )
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        last: dict[int, RequestOutput] = {}
        cursors: dict[tuple[int, int], SequenceCursor] = {}
        async with aclosing(self._openai.outputs()) as outputs:
            async for i, output in outputs:
                last[i], events = output, []
                hidden = self._openai.num_hidden_tokens
                usage = Usage.of([output], hidden) if self._continuous_usage else UNSET
                for completion in output.outputs:
                    cursor = cursors.setdefault((i, completion.index), SequenceCursor())
                    async for choice in self._added(i, output, completion, cursor):
                        events.append(self._chunk([choice], usage))
                if events:
                    yield b"".join(events)
        if self._with_usage:
            yield self._chunk([], Usage.of(list(last.values()), self._openai.num_hidden_tokens))
        yield DONE

    async def _choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        choice = await self._openai.choice(i, output, completion)
        answer = CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=choice.logprobs,
            prompt_logprobs=None if choice.prompt_logprobs is UNSET else choice.prompt_logprobs,
            finish_reason=choice.finish_reason,
        )
        if self._with_ids:
            answer.prompt_token_ids, answer.prompt_tokens = output.prompt_token_ids, self._prompt_text(output)
            answer.completion_token_ids = choice.completion_token_ids or []
            answer.completion_tokens = completion.text if answer.completion_token_ids else ""
        return answer

    async def _added(
        self, i: int, output: RequestOutput, completion: CompletionOutput, cursor: SequenceCursor
    ) -> AsyncGenerator[FirstCompletionChoice | CompletionChunkChoice, None]:
        start, begins = cursor.text, not cursor.tokens
        choice = await self._openai.added(i, output, completion, cursor)
        if choice is None:
            return
        prompt_logprobs = None if choice.prompt_logprobs is UNSET else choice.prompt_logprobs
        if begins and self._with_ids:
            yield FirstCompletionChoice(
                index=choice.index,
                prompt_token_ids=output.prompt_token_ids,
                prompt_logprobs=prompt_logprobs,
                prompt_tokens=self._prompt_text(output),
            )
            prompt_logprobs = None
        chunk = CompletionChunkChoice(
            index=choice.index,
            text=choice.text,
            arrival_time=_arrival(output),
            logprobs=choice.logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=choice.finish_reason or UNSET,
        )
        if self._with_ids:
            chunk.completion_token_ids = choice.completion_token_ids or []
            chunk.completion_tokens = completion.text[start : cursor.text] if chunk.completion_token_ids else ""
        yield chunk

    def _chunk(self, choices: list[FirstCompletionChoice | CompletionChunkChoice], usage: Usage | UnsetType) -> bytes:
        return event(
            CompletionChunk(
                id=self._openai.id, created=self._created, model=self._openai.model, choices=choices, usage=usage
            )
        )


def _arrival(output: RequestOutput) -> float | None:
    """Seconds from a request's first step to its latest token."""
    times = output.times
    return None if times.last_token is None else times.last_token - times.arrived - times.queued
