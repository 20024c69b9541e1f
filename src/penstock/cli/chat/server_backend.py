"""Chat backend of any server with OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
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

CONNECT_TIMEOUT = 10.0
"""Maximum seconds to connect. Responses have no time limit."""
UNLISTED = (404, 405, 501)
"""Statuses of servers that do not list models; they need ``--model-name``."""


class ModelCard(msgspec.Struct):
    """A model listed by a server."""

    id: str
    max_model_len: int | None = None
    """Context length, which only some servers report."""


class Models(msgspec.Struct):
    data: list[ModelCard]


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct):
    """Delta of a tool call; the first delta of a call has its id and name."""

    function: FunctionDelta
    index: int | None = None
    id: str | None = None


class ServerError(msgspec.Struct):
    """Error of a server, with the fields that most servers use."""

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
        url: URL of the API, including ``/v1``.
        key: API key; None: no key is sent.
        name: name of the model; None: the first one that the server lists.
    """

    def __init__(self, url: str, key: str | None, name: str | None) -> None:
        if key and not (key.isascii() and key.isprintable()):
            raise invalid("api_key", "must consist of printable ASCII characters: copy it again, without line breaks")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._name = name
        self.about = url
        self.context: int | None = None

    async def __aenter__(self) -> Self:
        self._client = httpx2.AsyncClient(headers=self._headers, timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT))
        try:
            await self._find_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, messages: list[Message], conversation: Conversation) -> AsyncGenerator[Answer, None]:
        body = {"messages": messages, **conversation.sampling}
        if conversation.tools:
            body["tools"] = conversation.tools
        async for answer in self._stream("/chat/completions", body):
            yield answer

    async def complete(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncGenerator[Answer, None]:
        """Complete a prompt without the chat template; otherwise the same as ``answer``.

        Args:
            sampling: sampling parameters, by their names in OpenAI's API.
        """
        async for answer in self._stream("/completions", {"prompt": prompt, **sampling}):
            yield answer

    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Answer, None]:
        body = {"model": self._name, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            async with self._client.stream("POST", f"{self._url}{path}", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(await response.aread(), response)
                async for answer in _read(response):
                    yield answer
        except httpx2.HTTPError as error:
            raise _no_response_error(self._url, error) from error

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
            raise _no_response_error(self._url, error) from error
        except msgspec.MsgspecError as error:
            raise invalid("url", f"{self._url} lists no models: check that it ends with /v1") from error
        known = {model.id: model.max_model_len for model in listed}
        if not known:
            raise invalid("url", f"{self._url} lists no models: load a model on the server")
        self._name = self._name or next(iter(known))
        self.context = known.get(self._name)
        self.about = f"{self._name} at {self._url}"


async def _read(response: httpx2.Response) -> AsyncGenerator[Answer, None]:
    """Yield the answer so far after each event."""
    reader, answer = EventReader(), Answer()
    async for received in response.aiter_bytes():  # not aiter_lines, which also splits at U+2028
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
        if choice.text:
            changes["text"] = answer.text + choice.text
        if delta := choice.delta:
            changes["text"] = answer.text + (delta.content or "")
            changes["reasoning"] = answer.reasoning + (delta.reasoning_content or delta.reasoning or "")
            changes["calls"] = _append_calls(answer.calls, delta.tool_calls or [])
        changes["finish_reason"] = choice.finish_reason or answer.finish_reason
    if chunk.usage is not None:
        changes |= {"prompt_tokens": chunk.usage.prompt_tokens, "output_tokens": chunk.usage.completion_tokens}
    return replace(answer, **changes)


def _append_calls(calls: tuple[ToolCall, ...], deltas: list[msgspec.Raw]) -> tuple[ToolCall, ...]:
    result = list(calls)
    for raw in deltas:
        try:
            delta = msgspec.json.decode(raw, type=ToolCallDelta)
        except msgspec.MsgspecError as error:
            raise PenstockError(Code.INTERNAL, f"the server sent an invalid tool call: {error}") from error
        name, arguments = delta.function.name or "", delta.function.arguments or ""
        index = len(result) - (delta.id is None) if delta.index is None else delta.index
        if 0 <= index < len(result):
            known = result[index]
            result[index] = replace(known, name=known.name + name, arguments=known.arguments + arguments)
        else:
            result.append(ToolCall(delta.id or f"call_{len(result)}", name, arguments))
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
    return PenstockError(code, f"{response.url} returned status {response.status_code}: {message}")


def _no_response_error(url: str, error: Exception) -> PenstockError:
    return PenstockError(Code.UNAVAILABLE, f"{url} does not respond: {error or type(error).__name__}")
