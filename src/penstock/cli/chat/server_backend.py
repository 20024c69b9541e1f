"""The backend of any server with OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Self

import httpx2
import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from ..bench.sse import DONE, EventReader, decode_chunk, error_message
from .backend import Answer, ContextFull
from .conversation import Conversation, Message
from .tools import ToolCall

TO_CONNECT = 10.0
"""Seconds. An answer may take any time."""
UNLISTED = (404, 405, 501)
"""Statuses of servers that list no models, which serve one that is named."""


class ModelCard(msgspec.Struct):
    """A model that a server has; some tell its context."""

    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct):
    data: list[ModelCard]


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct):
    """A piece of a tool call; the first has its id and name."""

    function: FunctionDelta
    index: int | None = None
    id: str | None = None


class ServerError(msgspec.Struct):
    """The error of a server, in the fields that servers agree on."""

    message: str = ""
    param: str | None = None
    code: str | int | None = None

    @property
    def context_is_full(self) -> bool:
        return self.param == "prompt" or self.code == "context_length_exceeded" or "context length" in self.message


class Refused(msgspec.Struct):
    error: ServerError


class Server:
    """A model on a server.

    Args:
        url: up to ``/v1``.
        key: sent along, where the server wants one.
        name: of the model; None takes the first that is listed.
    """

    def __init__(self, url: str, key: str | None, name: str | None) -> None:
        if key and not (key.isascii() and key.isprintable()):
            raise invalid("api_key", "is not a key: copy it again, without line breaks")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._name = name
        self.about = url
        self.context: int | None = None

    async def __aenter__(self) -> Self:
        self._client = httpx2.AsyncClient(headers=self._headers, timeout=httpx2.Timeout(None, connect=TO_CONNECT))
        try:
            await self._find_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, messages: list[Message], conversation: Conversation) -> AsyncGenerator[Answer, None]:
        body: dict[str, Any] = {
            "model": self._name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **conversation.sampling,
        }
        if conversation.tools:
            body["tools"] = conversation.tools
        try:
            async with self._client.stream("POST", f"{self._url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(await response.aread(), response)
                async for answer in _read(response):
                    yield answer
        except httpx2.HTTPError as error:
            raise _no_answer_error(self._url, error) from error

    async def _find_model(self) -> None:
        try:
            response = await self._client.get(f"{self._url}/models")
            if response.status_code in UNLISTED and self._name:
                self.about = f"{self._name} at {self._url}"
                return
            if response.status_code != 200:
                raise _refusal(response.content, response)
            listed = msgspec.json.decode(response.content, type=Models).data
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _no_answer_error(self._url, error) from error
        except msgspec.MsgspecError as error:
            raise invalid("url", f"{self._url} lists no models: does it end as it should, with /v1?") from error
        known = {model.id: model.max_model_len for model in listed}
        if not known:
            raise invalid("url", f"{self._url} lists no models")
        self._name = self._name or next(iter(known))
        self.context = known.get(self._name)
        self.about = f"{self._name} at {self._url}"


async def _read(response: httpx2.Response) -> AsyncGenerator[Answer, None]:
    """The answer so far, with every event that tells something new."""
    reader, answer = EventReader(), Answer()
    async for received in response.aiter_bytes():  # lines are for the reader: httpx2 would cut texts at U+2028, too
        for payload in reader.feed(received):
            if payload == DONE:
                return
            answer = _append_chunk(answer, payload)
            yield answer


def _append_chunk(answer: Answer, payload: bytes) -> Answer:
    try:
        chunk = decode_chunk(payload)
    except msgspec.MsgspecError as error:
        raise PenstockError(Code.INTERNAL, f"the server sent an invalid chunk: {error}") from error
    if chunk.error:
        raise PenstockError(Code.INTERNAL, error_message(payload))
    changes: dict[str, Any] = {}
    for choice in chunk.choices:
        if delta := choice.delta:
            changes["text"] = answer.text + (delta.content or "")
            changes["reasoning"] = answer.reasoning + (delta.reasoning_content or delta.reasoning or "")
            changes["calls"] = _append_calls(answer.calls, delta.tool_calls or [])
        changes["finish_reason"] = choice.finish_reason or answer.finish_reason
    if chunk.usage is not None:
        changes |= {"prompt_tokens": chunk.usage.prompt_tokens, "output_tokens": chunk.usage.completion_tokens}
    return replace(answer, **changes)


def _append_calls(calls: tuple[ToolCall, ...], pieces: list[msgspec.Raw]) -> tuple[ToolCall, ...]:
    result = list(calls)
    for raw in pieces:
        try:
            piece = msgspec.json.decode(raw, type=ToolCallDelta)
        except msgspec.MsgspecError as error:
            raise PenstockError(Code.INTERNAL, f"the server sent an invalid tool call: {error}") from error
        name, arguments = piece.function.name or "", piece.function.arguments or ""
        index = len(result) - (piece.id is None) if piece.index is None else piece.index
        if 0 <= index < len(result):
            known = result[index]
            result[index] = replace(known, name=known.name + name, arguments=known.arguments + arguments)
        else:
            result.append(ToolCall(piece.id or f"call_{len(result)}", name, arguments))
    return tuple(result)


def _refusal(body: bytes, response: httpx2.Response) -> Exception:
    message = error_message(body)
    try:
        reason = msgspec.json.decode(body, type=Refused).error
    except msgspec.MsgspecError:
        reason = ServerError()
    if reason.context_is_full:
        return ContextFull(message)
    code = {401: Code.UNAUTHORIZED, 404: Code.NOT_FOUND, 503: Code.UNAVAILABLE}.get(response.status_code, Code.INVALID)
    return PenstockError(code, f"{response.url} answered {response.status_code}: {message}")


def _no_answer_error(url: str, error: Exception) -> PenstockError:
    return PenstockError(Code.UNAVAILABLE, f"{url} does not answer: {error or type(error).__name__}")
