"""Answers of Ollama's chats and generations, from OpenAI's handlers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.stream_cursor import StreamCursor
from penstock.serve.dialects.openai.chat import ChatHandler
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.responses import TokenLogprob, TopLogprob
from penstock.serve.generation import SequenceCursor

from .responses import Answer, AnswerMessage, encode, finish, now


class Piece(NamedTuple):
    """What a step added to the answer."""

    output: RequestOutput
    text: str = ""
    thinking: str = ""
    logprobs: list[TokenLogprob] | None = None


async def chat_pieces(handler: ChatHandler) -> AsyncGenerator[Piece, None]:
    """The answer of a chat, piece by piece, the last one with the finished output."""
    cursor = StreamCursor()
    async with aclosing(handler.outputs()) as outputs:
        async for output in outputs:
            for chunk in handler.added(output.outputs[0], cursor):
                logprobs = chunk.logprobs.content if chunk.logprobs else None
                yield Piece(output, chunk.delta.content or "", chunk.delta.reasoning or "", logprobs)


async def raw_pieces(handler: CompletionHandler) -> AsyncGenerator[Piece, None]:
    """The answer of a prompt that is continued as it is."""
    cursor = SequenceCursor()
    async with aclosing(handler.outputs()) as outputs:
        async for i, output in outputs:
            choice = await handler.added(i, output, output.outputs[0], cursor)
            if choice is None:
                continue
            logprobs = None
            if isinstance(given := choice.logprobs, msgspec.Struct):
                likeliest = zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True)
                logprobs = [_token(*each) for each in likeliest]
            yield Piece(output, choice.text, "", logprobs)


class OllamaHandler:
    """One chat or generation.

    Args:
        model: as the request names it.
        pieces: of the answer.
        is_chat: whether the text is a message's content, or else ``response``.
        calls: the tool calls of a finished output.
    """

    def __init__(
        self,
        model: str,
        pieces: AsyncGenerator[Piece, None],
        is_chat: bool,
        calls: Callable[[RequestOutput], list[dict[str, Any]]] = lambda output: [],
    ) -> None:
        self._model = model
        self._pieces = pieces
        self._is_chat = is_chat
        self._calls = calls

    async def full(self) -> AsyncGenerator[bytes, None]:
        texts, thoughts, logprobs = [], [], []
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                thoughts.append(piece.thinking)
                logprobs += piece.logprobs or []
        whole = Piece(piece.output, "".join(texts), "".join(thoughts), logprobs or None)
        yield encode(finish(self._answer(whole, self._calls(whole.output)), whole.output))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                if piece.text or piece.thinking or piece.logprobs:
                    yield encode(self._answer(piece)) + b"\n"
        last = piece.output
        if calls := self._calls(last):
            yield encode(self._answer(Piece(last), calls)) + b"\n"
        yield encode(finish(self._answer(Piece(last)), last)) + b"\n"

    def _answer(self, piece: Piece, calls: list[dict[str, Any]] | None = None) -> Answer:
        answer = Answer(model=self._model, created_at=now(), logprobs=piece.logprobs or UNSET)
        thinking = piece.thinking or UNSET
        if self._is_chat:
            answer.message = AnswerMessage(content=piece.text, thinking=thinking, tool_calls=calls or UNSET)
        else:
            answer.response, answer.thinking = piece.text, thinking
        return answer


def calls_of(handler: ChatHandler) -> Callable[[RequestOutput], list[dict[str, Any]]]:
    """Reads the tool calls of a finished output, with arguments as objects."""

    def calls(output: RequestOutput) -> list[dict[str, Any]]:
        found = handler.message(output.outputs[0]).tool_calls
        return [
            {"function": {"index": i, "name": one.name, "arguments": _object(one.arguments)}}
            for i, one in enumerate(found)
        ]

    return calls


def _object(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:  # the answer ended within them
        return {}


def _token(token: str, logprob: float | None, top: dict[str, float] | None) -> TokenLogprob:
    others = [TopLogprob(token=text, logprob=value, bytes=[*text.encode()]) for text, value in (top or {}).items()]
    return TokenLogprob(token=token, logprob=logprob or 0.0, bytes=[*token.encode()], top_logprobs=others)
