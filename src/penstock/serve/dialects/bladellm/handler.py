"""Formats the choices of OpenAI's handlers as BladeLLM's responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from msgspec import UNSET

from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.stream_cursor import StreamCursor
from penstock.serve.dialects.openai.chat import ChatHandler
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.responses import ChatDelta, ChatMessage, ChunkChoice
from penstock.serve.dialects.openai.responses import CompletionChoice as OpenAIChoice
from penstock.serve.generation import SequenceCursor

from .responses import DONE, ChatChoice, CompletionChoice, CompletionResponse, Usage, encode, event

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
            for completion in output.outputs:
                choices.append(_choice(await self._openai.choice(i, output, completion)))
        yield encode(self._response(choices, last))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        last: dict[int, RequestOutput] = {}
        progress: dict[tuple[int, int], SequenceCursor] = {}
        async with aclosing(self._openai.outputs()) as outputs:
            async for i, output in outputs:
                last[i] = output
                for completion in output.outputs:
                    so_far = progress.setdefault((i, completion.index), SequenceCursor())
                    added = await self._openai.added(i, output, completion, so_far)
                    for choice in added.chunks() if added else ():
                        yield event(self._response([_choice(choice)], last))
        yield DONE

    def _response(self, choices: list[CompletionChoice], last: dict[int, RequestOutput]) -> CompletionResponse:
        usage = Usage.of(list(last.values()))
        return CompletionResponse(id=self._id, choices=choices, object="text_completion", usage=usage)


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
        for completion in last.outputs:
            choice = await self._openai.choice(completion, last.prompt_token_ids)
            reason = choice.finish_reason or ""
            choices.append(
                ChatChoice(
                    index=choice.index,
                    message=_adapt(choice.message),
                    logprobs=choice.logprobs,
                    finish_reason=reason,
                )
            )
        usage = Usage.of([last])
        yield encode(CompletionResponse(id=self._id, choices=choices, object="chat.completion", usage=usage))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        cursors: dict[int, StreamCursor] = {}
        begun: set[int] = set()
        async with aclosing(self._openai.outputs()) as outputs:
            async for output in outputs:
                usage = Usage.of([output])
                for completion in output.outputs:
                    cursor = cursors.setdefault(completion.index, StreamCursor())
                    for choice in self._openai.added(completion, cursor):
                        if choice.index not in begun:  # the first chunk has the role
                            begun.add(choice.index)
                            choice.delta.role = "assistant"
                        chunk = CompletionResponse(
                            id=self._id, choices=[_chunk(choice)], object="chat.completion.chunk", usage=usage
                        )
                        yield event(chunk)
        yield DONE


def _chunk(choice: ChunkChoice) -> ChatChoice:
    if choice.delta == ChatDelta():
        choice.delta.content = ""
    return ChatChoice(
        index=choice.index,
        delta=_adapt(choice.delta),
        logprobs=choice.logprobs,
        finish_reason=choice.finish_reason or "",
    )


def _choice(choice: OpenAIChoice) -> CompletionChoice:
    reason = choice.finish_reason or ""
    return CompletionChoice(index=choice.index, text=choice.text, logprobs=choice.logprobs, finish_reason=reason)


def _adapt(choice: T) -> T:
    """Remove ``reasoning``: BladeLLM has ``reasoning_content`` alone."""
    choice.reasoning = UNSET
    choice.reasoning_content = choice.reasoning_content or UNSET
    return choice
