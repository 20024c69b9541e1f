"""Formats the choices of OpenAI's handlers as BladeLLM's responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TypeVar

import msgspec
from msgspec import UNSET

from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.stream_cursor import StreamCursor
from penstock.serve.dialects.openai.chat import ChatHandler
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.responses import ChatDelta, ChatMessage, ChunkChoice
from penstock.serve.dialects.openai.responses import CompletionChoice as Told
from penstock.serve.generation import SequenceCursor

from .responses import DONE, Answer, ChatChoice, CompletionChoice, Usage, encode, event

T = TypeVar("T", ChatMessage, ChatDelta)


class BladeCompletionHandler:
    """One request for completions."""

    def __init__(self, openai: CompletionHandler, request_id: str) -> None:
        self._openai = openai
        self._id = request_id

    async def full(self) -> AsyncGenerator[bytes, None]:
        last: dict[int, RequestOutput] = {}
        async with aclosing(self._openai.outputs()) as outputs:
            async for i, output in outputs:
                last[i] = output
        choices = []
        for i, output in sorted(last.items()):
            for made in output.outputs:
                told = await self._openai.choice(i, output, made)
                reason = told.finish_reason or ""
                choices.append(
                    CompletionChoice(index=told.index, text=told.text, logprobs=told.logprobs, finish_reason=reason)
                )
        yield encode(self._answer(choices, last))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        last: dict[int, RequestOutput] = {}
        progress: dict[tuple[int, int], SequenceCursor] = {}
        async with aclosing(self._openai.outputs()) as outputs:
            async for i, output in outputs:
                last[i] = output
                for made in output.outputs:
                    so_far = progress.setdefault((i, made.index), SequenceCursor())
                    told = await self._openai.new(i, output, made, so_far)
                    for choice in self._chunks(told) if told else ():
                        yield event(self._answer([choice], last))
        yield DONE

    def _chunks(self, told: Told) -> Iterator[CompletionChoice]:
        """What is new, and at the end a chunk of its own that says why."""
        if told.text or told.logprobs:
            yield CompletionChoice(index=told.index, text=told.text, logprobs=told.logprobs)
        if told.finish_reason:
            yield CompletionChoice(index=told.index, text="", finish_reason=told.finish_reason)

    def _answer(self, choices: list[CompletionChoice], last: dict[int, RequestOutput]) -> Answer:
        usage = Usage.of(list(last.values()))
        return Answer(id=self._id, choices=choices, object="text_completion", usage=usage)


class BladeChatHandler:
    """One chat."""

    def __init__(self, openai: ChatHandler, request_id: str) -> None:
        self._openai = openai
        self._id = request_id

    async def full(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._openai.outputs()) as outputs:
            async for output in outputs:
                last = output
        choices = []
        for made in last.outputs:
            told = await self._openai.choice(made, last.prompt_token_ids)
            reason = told.finish_reason or ""
            choices.append(
                ChatChoice(index=told.index, message=_own(told.message), logprobs=told.logprobs, finish_reason=reason)
            )
        usage = Usage.of([last])
        yield encode(Answer(id=self._id, choices=choices, object="chat.completion", usage=usage))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        cursor: dict[int, StreamCursor] = {}
        async with aclosing(self._openai.outputs()) as outputs:
            async for output in outputs:
                usage = Usage.of([output])
                for made in output.outputs:
                    begins = made.index not in cursor
                    new = self._openai.new(made, cursor.setdefault(made.index, StreamCursor()))
                    for choice in self._chunks(new, begins):
                        chunk = Answer(id=self._id, choices=[choice], object="chat.completion.chunk", usage=usage)
                        yield event(chunk)
        yield DONE

    def _chunks(self, new: list[ChunkChoice], begins: bool) -> Iterator[ChatChoice]:
        """What is new, of which the first has the role, and at the end a chunk of its own that says why."""
        for told in new:
            if begins:
                told.delta = msgspec.structs.replace(told.delta, role="assistant")
            if told.delta != ChatDelta() or told.logprobs:
                yield ChatChoice(index=told.index, delta=_own(told.delta), logprobs=told.logprobs)
            if told.finish_reason:
                yield ChatChoice(index=told.index, delta=_own(ChatDelta(content="")), finish_reason=told.finish_reason)


def _own(told: T) -> T:
    """Without ``reasoning``: BladeLLM has ``reasoning_content`` alone."""
    told.reasoning = UNSET
    told.reasoning_content = told.reasoning_content or UNSET
    return told
