"""Routes of Ollama's API."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core import Code, PenstockError
from penstock.frontend.outputs import CompletionOutput, RequestOutput, embedding_of
from penstock.serve.chat.request import ChatRequest as OpenAIChatRequest
from penstock.serve.dialects.endpoints import DialectRoutes
from penstock.serve.dialects.openai.chat import ChatHandler
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.embeddings import EmbeddingHandler, EmbeddingRequest
from penstock.serve.dialects.openai.schema import CompletionRequest, TokenLogprob, TopLogprob
from penstock.serve.generation import GenerationHandler
from penstock.serve.http.body import convert
from penstock.serve.http.reply import Json, Reply, encode
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Endpoint, Routes
from penstock.serve.models.served_models import ServedModel, ServedModels

from .convert import chat_fields, generate_fields
from .keep_alive import seconds_of
from .models import OllamaModels
from .schema import (
    ERROR_FORMAT,
    MEDIA_TYPE,
    NANOSECONDS,
    Answer,
    AnswerMessage,
    ChatRequest,
    Embeddings,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaRequest,
    OneEmbedding,
    ShowRequest,
    finish,
    now,
)

SCHEMAS = (ChatRequest, GenerateRequest, EmbedRequest, EmbeddingsRequest, ShowRequest, Answer)
VERSION = "0.12.6"
"""Ollama version that ``/api/version`` returns; clients use it to choose features."""
UNSUPPORTED = ("create", "copy", "delete", "push")
PREFIX = "ollama."
"""Prefix of schema names in the OpenAPI document."""
TRUNCATE_TO_CONTEXT = -1
"""Value of ``truncate_prompt_tokens`` that truncates prompts to the context length."""


T = TypeVar("T", bound=OllamaRequest)


class Delta(NamedTuple):
    """New output of one step."""

    text: str = ""
    thinking: str = ""
    logprobs: list[TokenLogprob] | None = None


class _OllamaHandler(GenerationHandler, ABC):
    """Base class of the chat and prompt handlers."""

    is_chat = False
    """True for ``/api/chat`` (text in ``message.content``); False for ``/api/generate`` (text in ``response``)."""
    requested_model = ""
    """Model name in the request."""

    @abstractmethod
    def deltas(self, completion: CompletionOutput) -> list[Delta]:
        """The output since the last call of this method."""

    def calls(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The tool calls of a finished chat, in Ollama's format."""
        return []

    def reason(self, completion: CompletionOutput) -> str:
        """Ollama's ``done_reason``."""
        return completion.finish_reason or "stop"

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        output = outputs[0]
        deltas = self.deltas(output.outputs[0])
        full = Delta(
            "".join([delta.text for delta in deltas]),
            "".join([delta.thinking for delta in deltas]),
            [token for delta in deltas for token in delta.logprobs or ()],
        )
        answer = self._answer(full, self.calls(output.outputs[0]))
        return encode(finish(answer, output, self.reason(output.outputs[0])))

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        completion = output.outputs[0]
        lines = [self._answer(delta) for delta in self.deltas(completion) if any(delta)]
        if completion.finished:
            if calls := self.calls(completion):
                lines.append(self._answer(Delta(), calls))
            lines.append(finish(self._answer(Delta()), output, self.reason(completion)))
        return b"".join([encode(line) + b"\n" for line in lines])

    def format_end(self) -> bytes:
        return b""

    def _answer(self, delta: Delta, calls: list[dict[str, Any]] | None = None) -> Answer:
        answer = Answer(model=self.requested_model, created_at=now(), logprobs=delta.logprobs or UNSET)
        thinking = delta.thinking or UNSET
        if self.is_chat:
            answer.message = AnswerMessage(content=delta.text, thinking=thinking, tool_calls=calls or UNSET)
        else:
            answer.response, answer.thinking = delta.text, thinking
        return answer


class OllamaChatHandler(_OllamaHandler, ChatHandler):
    """Handler of a chat request, or of a generate request with the chat template."""

    def deltas(self, completion: CompletionOutput) -> list[Delta]:
        return [
            Delta(
                chunk.delta.content or "",
                chunk.delta.reasoning or "",
                chunk.logprobs.content if chunk.logprobs else None,
            )
            for chunk in self.delta_choices(completion)
        ]

    def reason(self, completion: CompletionOutput) -> str:
        return "length" if self.cuts_call(completion) else super().reason(completion)

    def calls(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        message = self.message(completion)
        calls = message.tool_calls if self.is_chat else []
        if self.cuts_call(completion) and message.cut_call:
            calls = calls[:-1]  # Ollama's arguments are objects, which cannot be incomplete
        return [
            {"function": {"index": i, "name": call.name, "arguments": _object(call.arguments)}}
            for i, call in enumerate(calls)
        ]


class OllamaPromptHandler(_OllamaHandler, CompletionHandler):
    """Handler of a generate request without the chat template (``raw`` or ``suffix``)."""

    def deltas(self, completion: CompletionOutput) -> list[Delta]:
        if (delta := self.cursors[completion.index].advance(completion)) is None:
            return []
        logprobs = None
        if self.sampling.logprobs is not None:
            lists = self.logprobs_of(completion.index, delta.positions)
            logprobs = [
                _token(*each) for each in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True)
            ]
        return [Delta(delta.text, "", logprobs)]


class OllamaEmbeddingHandler(EmbeddingHandler):
    def __init__(
        self, service: ServedModel, record: RequestRecord, request: EmbedRequest | EmbeddingsRequest, model: str
    ) -> None:
        converted = EmbeddingRequest(input="", model=model, truncate_prompt_tokens=TRUNCATE_TO_CONTEXT)
        if isinstance(request, EmbedRequest):
            converted.input = request.input if isinstance(request.input, str) else [*request.input]
            converted.dimensions = request.dimensions
            if request.truncate is False:
                converted.truncate_prompt_tokens = None
        else:
            converted.input = request.prompt
        super().__init__(service, record, converted)
        self._requested_model = request.model or model
        self._is_list = isinstance(request, EmbedRequest)
        self._started = time.monotonic()
        self.field = "input" if self._is_list else "prompt"

    def response(self, outputs: list[RequestOutput]) -> object:
        if not self._is_list:
            return OneEmbedding(embedding=embedding_of(outputs[0]))
        return Embeddings(
            model=self._requested_model,
            embeddings=[embedding_of(output) for output in outputs],
            total_duration=int((time.monotonic() - self._started) * NANOSECONDS),
            prompt_eval_count=sum(len(output.prompt_token_ids) for output in outputs),
        )


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add the routes under ``/api``."""
    routes.error_formats.add(ERROR_FORMAT, "/api/")
    api = DialectRoutes(routes, served_models, schemas=SCHEMAS, prefix=PREFIX)
    models = OllamaModels(served_models)

    def chat(request: ChatRequest, record: RequestRecord, size: int) -> Response | Awaitable[Response]:
        service = models.find(request.model)
        if not request.messages:
            return _loaded(service, request, is_chat=True)
        return reply_chat(service, record, request, chat_fields(request, record.unknown), size, is_chat=True)

    def generate(request: GenerateRequest, record: RequestRecord, size: int) -> Response | Awaitable[Response]:
        service = models.find(request.model)
        if not request.prompt and not request.suffix and not request.images:
            return _loaded(service, request, is_chat=False)
        fields = generate_fields(request, record.unknown)
        if not (request.raw or request.suffix):
            return reply_chat(service, record, request, fields, size, is_chat=False)
        if request.images:
            message = "images: cannot be combined with raw or suffix, which use no chat template: leave one of them out"
            raise PenstockError(Code.UNSUPPORTED, message, "images")
        max_model_len = service.gateway.engine_pool.known_engine().max_model_len
        fields = {"max_tokens": max_model_len} | fields | {"model": models.name_of(request.model or "")}
        converted = convert(fields, CompletionRequest, record.unknown, "numbers")
        return reply(OllamaPromptHandler(service, record, converted), request)

    def reply_chat(
        service: ServedModel,
        record: RequestRecord,
        request: ChatRequest | GenerateRequest,
        fields: dict[str, Any],
        size: int,
        is_chat: bool,
    ) -> Response:
        fields["model"] = models.name_of(request.model or "")
        converted = convert(fields, OpenAIChatRequest, record.unknown, "numbers")
        handler = OllamaChatHandler(service, record, converted, size)
        handler.is_chat = is_chat
        return reply(handler, request)

    def reply(handler: _OllamaHandler, request: ChatRequest | GenerateRequest) -> Response:
        handler.requested_model = request.model or ""
        keep_alive(handler.service, request)
        return Reply.of(handler.service, handler, ERROR_FORMAT, request.stream is not False, MEDIA_TYPE)

    def keep_alive(service: ServedModel, request: OllamaRequest) -> None:
        if request.keep_alive is not None and _may_change(service):
            service.keep_alive.change_after_requests(seconds_of(request.keep_alive))

    def generation(
        schema: type[T], answer: Callable[[T, RequestRecord, int], Response | Awaitable[Response]]
    ) -> Endpoint:
        @wraps(answer)
        async def endpoint(raw_request: Request) -> Response:
            response = await api.handle(raw_request, schema, answer, media=True)
            return response if isinstance(response, Response) else await response

        return endpoint

    def embedding(schema: type[EmbedRequest] | type[EmbeddingsRequest]) -> Endpoint:
        async def endpoint(raw_request: Request) -> Response:
            request, _ = await api.read(raw_request, schema)
            service, name = models.find(request.model), models.name_of(request.model or "")
            if isinstance(request, EmbedRequest) and not request.input and isinstance(request.input, list):
                return Json(
                    Embeddings(model=request.model or name, embeddings=[], total_duration=0, prompt_eval_count=0)
                )
            keep_alive(service, request)
            handler = OllamaEmbeddingHandler(service, record_of(raw_request.scope), request, name)
            return Reply.of(service, handler, ERROR_FORMAT, False)

        return endpoint

    async def tags(_: Request) -> Response:
        return JSONResponse({"models": await asyncio.to_thread(models.listed)})

    async def running(_: Request) -> Response:
        return JSONResponse({"models": await asyncio.to_thread(models.running)})

    async def show(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, ShowRequest)
        return JSONResponse(await asyncio.to_thread(models.shown, request.model or request.name))

    async def pull(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, ShowRequest)
        models.find(request.model or request.name)  # only checks the name: served models need no download
        return Response(encode({"status": "success"}) + b"\n", media_type=MEDIA_TYPE.decode())

    async def version(_: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def unsupported(raw_request: Request) -> Response:
        path, hint = raw_request.url.path, "models are set when the server starts (penstock serve --model)"
        message = f"{path}: not supported; {hint}"
        raise PenstockError(Code.UNSUPPORTED, message)

    api.post("/api/chat", generation(ChatRequest, chat), "Create a chat response (Ollama)", ChatRequest, answer=Answer)
    complete = generation(GenerateRequest, generate)
    api.post("/api/generate", complete, "Complete a prompt (Ollama)", GenerateRequest, answer=Answer)
    api.post("/api/embed", embedding(EmbedRequest), "Embed texts (Ollama)", EmbedRequest)
    api.post("/api/embeddings", embedding(EmbeddingsRequest), "Embed one text (Ollama)", EmbeddingsRequest)
    api.post("/api/show", show, "Show a model (Ollama)", ShowRequest)
    api.post("/api/pull", pull, "Pull a model (Ollama); succeeds for served models", ShowRequest)
    api.add("/api/tags", tags, "List models (Ollama)")
    api.add("/api/ps", running, "List loaded models (Ollama)")
    api.add("/api/version", version, "Version of Ollama's API")
    for name in UNSUPPORTED:
        method = "DELETE" if name == "delete" else "POST"
        api.add(f"/api/{name}", unsupported, f"Ollama's {name}; not supported", method=method)


async def _loaded(service: ServedModel, request: ChatRequest | GenerateRequest, is_chat: bool) -> Response:
    """Load a model, or unload it with ``keep_alive`` 0. Ollama's clients send such requests without a prompt."""
    keep_alive, given = service.keep_alive, request.keep_alive is not None
    seconds = seconds_of(request.keep_alive) if request.keep_alive is not None else None
    unloads = given and seconds == 0
    async with nullcontext() if unloads else keep_alive.loaded():
        if given and _may_change(service):
            await keep_alive.change(seconds)
    is_unloaded = unloads and (_may_change(service) or service.gateway.engine_pool.is_held)
    answer = Answer(
        model=request.model or "", created_at=now(), done=True, done_reason="unload" if is_unloaded else "load"
    )
    if is_chat:
        answer.message = AnswerMessage()
    else:
        answer.response = ""
    return Json(answer)


def _may_change(service: ServedModel) -> bool:
    """True if clients may change the keep-alive time: models are unloaded, and that needs no admin key."""
    return service.keep_alive.may_change and not service.options.admin_api_key


def _object(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:  # generation ended inside the arguments
        return {}


def _token(token: str, logprob: float | None, top: dict[str, float] | None) -> TokenLogprob:
    others = [TopLogprob(token=text, logprob=value, bytes=[*text.encode()]) for text, value in (top or {}).items()]
    return TokenLogprob(token=token, logprob=logprob or 0.0, bytes=[*token.encode()], top_logprobs=others)
