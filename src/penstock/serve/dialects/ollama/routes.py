"""Routes of Ollama's API."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

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
    OneEmbedding,
    ShowRequest,
    finish,
    now,
)

SCHEMAS = (ChatRequest, GenerateRequest, EmbedRequest, EmbeddingsRequest, ShowRequest, Answer)
VERSION = "0.12.6"
"""Version of Ollama whose API this is: clients ask for it to know what they may use."""
UNSUPPORTED = ("create", "copy", "delete", "push")
PREFIX = "ollama."
"""Of the schemas' names in the OpenAPI document."""
WHOLE_CONTEXT = -1
"""Value of ``truncate_prompt_tokens``: what the model takes."""


class Piece(NamedTuple):
    """What a step added to the answer."""

    text: str = ""
    thinking: str = ""
    logprobs: list[TokenLogprob] | None = None


class _OllamaHandler(GenerationHandler):
    """One chat or generation."""

    is_chat = False
    """Whether the text is a message's content, or else ``response``."""
    asked = ""
    """The model as the request names it."""

    def pieces(self, completion: CompletionOutput) -> list[Piece]:
        """What a step added."""
        raise NotImplementedError

    def calls(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The tool calls of a finished chat."""
        return []

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        output = outputs[0]
        pieces = self.pieces(output.outputs[0])
        whole = Piece(
            "".join([piece.text for piece in pieces]),
            "".join([piece.thinking for piece in pieces]),
            [token for piece in pieces for token in piece.logprobs or ()],
        )
        return encode(finish(self._answer(whole, self.calls(output.outputs[0])), output))

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        completion = output.outputs[0]
        lines = [self._answer(piece) for piece in self.pieces(completion) if any(piece)]
        if completion.finished:
            if calls := self.calls(completion):
                lines.append(self._answer(Piece(), calls))
            lines.append(finish(self._answer(Piece()), output))
        return b"".join([encode(line) + b"\n" for line in lines])

    def format_end(self) -> bytes:
        return b""

    def _answer(self, piece: Piece, calls: list[dict[str, Any]] | None = None) -> Answer:
        answer = Answer(model=self.asked, created_at=now(), logprobs=piece.logprobs or UNSET)
        thinking = piece.thinking or UNSET
        if self.is_chat:
            answer.message = AnswerMessage(content=piece.text, thinking=thinking, tool_calls=calls or UNSET)
        else:
            answer.response, answer.thinking = piece.text, thinking
        return answer


class OllamaChatHandler(_OllamaHandler, ChatHandler):
    """A chat, or a prompt that the chat template renders."""

    def pieces(self, completion: CompletionOutput) -> list[Piece]:
        return [
            Piece(
                chunk.delta.content or "",
                chunk.delta.reasoning or "",
                chunk.logprobs.content if chunk.logprobs else None,
            )
            for chunk in self.added(completion)
        ]

    def calls(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        found = self.message(completion).tool_calls if self.is_chat else []
        return [
            {"function": {"index": i, "name": one.name, "arguments": _object(one.arguments)}}
            for i, one in enumerate(found)
        ]


class OllamaPromptHandler(_OllamaHandler, CompletionHandler):
    """A prompt that is continued as it is."""

    def pieces(self, completion: CompletionOutput) -> list[Piece]:
        if (piece := self.cursors[completion.index].advance(completion)) is None:
            return []
        logprobs = None
        if self.sampling.logprobs is not None:
            given = self.logprobs_of(completion.index, piece.positions)
            likeliest = zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True)
            logprobs = [_token(*each) for each in likeliest]
        return [Piece(piece.text, "", logprobs)]


class OllamaEmbeddingHandler(EmbeddingHandler):
    """One request for vectors."""

    def __init__(
        self, service: ServedModel, record: RequestRecord, request: EmbedRequest | EmbeddingsRequest, model: str
    ) -> None:
        converted = EmbeddingRequest(input="", model=model, truncate_prompt_tokens=WHOLE_CONTEXT)
        if isinstance(request, EmbedRequest):
            converted.input = request.input if isinstance(request.input, str) else [*request.input]
            converted.dimensions = request.dimensions
            if request.truncate is False:
                converted.truncate_prompt_tokens = None
        else:
            converted.input = request.prompt
        super().__init__(service, record, converted)
        self._asked, self._is_list, self._started = (
            request.model or model,
            isinstance(request, EmbedRequest),
            time.monotonic(),
        )
        self.field = "input" if self._is_list else "prompt"

    def response(self, outputs: list[RequestOutput]) -> object:
        if not self._is_list:
            return OneEmbedding(embedding=embedding_of(outputs[0]))
        return Embeddings(
            model=self._asked,
            embeddings=[embedding_of(output) for output in outputs],
            total_duration=int((time.monotonic() - self._started) * NANOSECONDS),
            prompt_eval_count=sum(len(output.prompt_token_ids) for output in outputs),
        )


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add the paths below ``/api``."""
    routes.error_formats.add(ERROR_FORMAT, "/api/")
    added = DialectRoutes(routes, served_models, schemas=SCHEMAS, prefix=PREFIX)
    models = OllamaModels(served_models)

    def chat(request: ChatRequest, record: RequestRecord, size: int) -> Response:
        service = models.find(request.model)
        if not request.messages:
            return _loaded(request, is_chat=True)
        return reply_chat(service, record, request, chat_fields(request, record.unknown), size, is_chat=True)

    def generate(request: GenerateRequest, record: RequestRecord, size: int) -> Response:
        service = models.find(request.model)
        if not request.prompt and not request.suffix and not request.images:
            return _loaded(request, is_chat=False)
        fields = generate_fields(request, record.unknown)
        if not (request.raw or request.suffix):
            return reply_chat(service, record, request, fields, size, is_chat=False)
        longest = service.gateway.engine_pool.require_engine().max_model_len
        fields = {"max_tokens": longest} | fields | {"model": models.name_of(request.model or "")}
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
        handler.asked = request.model or ""
        return Reply.of(handler.service, handler, ERROR_FORMAT, request.stream is not False, MEDIA_TYPE)

    def embedding(schema: type[EmbedRequest] | type[EmbeddingsRequest]) -> Endpoint:
        async def endpoint(raw_request: Request) -> Response:
            request, _ = await added.read(raw_request, schema)
            service, name = models.find(request.model), models.name_of(request.model or "")
            if isinstance(request, EmbedRequest) and not request.input and isinstance(request.input, list):
                return Json(
                    Embeddings(model=request.model or name, embeddings=[], total_duration=0, prompt_eval_count=0)
                )
            handler = OllamaEmbeddingHandler(service, record_of(raw_request.scope), request, name)
            return Reply.of(service, handler, ERROR_FORMAT, False)

        return endpoint

    async def tags(_: Request) -> Response:
        return JSONResponse({"models": await asyncio.to_thread(models.listed)})

    async def running(_: Request) -> Response:
        return JSONResponse({"models": await asyncio.to_thread(models.running)})

    async def show(raw_request: Request) -> Response:
        request, _ = await added.read(raw_request, ShowRequest)
        return JSONResponse(await asyncio.to_thread(models.shown, request.model or request.name))

    async def pull(raw_request: Request) -> Response:
        request, _ = await added.read(raw_request, ShowRequest)
        models.find(request.model or request.name)  # what is served is there already
        return Response(encode({"status": "success"}) + b"\n", media_type=MEDIA_TYPE.decode())

    async def version(_: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def unsupported(raw_request: Request) -> Response:
        message = f"{raw_request.url.path}: models are chosen where the server is started (penstock serve --model)"
        raise PenstockError(Code.UNSUPPORTED, message)

    chat_endpoint = added.answering(ChatRequest, chat, media=True)
    added.post("/api/chat", chat_endpoint, "Ollama's chat", ChatRequest, answer=Answer)
    generate_endpoint = added.answering(GenerateRequest, generate, media=True)
    continuation = "Ollama's continuation of a prompt"
    added.post("/api/generate", generate_endpoint, continuation, GenerateRequest, answer=Answer)
    added.post("/api/embed", embedding(EmbedRequest), "Ollama's embeddings of texts", EmbedRequest)
    one = "Ollama's embedding of one text"
    added.post("/api/embeddings", embedding(EmbeddingsRequest), one, EmbeddingsRequest)
    added.post("/api/show", show, "Ollama's description of a model", ShowRequest)
    added.post("/api/pull", pull, "Ollama's download, which finds models that are served", ShowRequest)
    added.add("/api/tags", tags, "Ollama's list of models")
    added.add("/api/ps", running, "Ollama's list of loaded models")
    added.add("/api/version", version, "The version of Ollama's API")
    for name in UNSUPPORTED:
        method = "DELETE" if name == "delete" else "POST"
        added.add(f"/api/{name}", unsupported, f"Ollama's {name}, which is refused", method=method)


def _loaded(request: ChatRequest | GenerateRequest, is_chat: bool) -> Response:
    """The answer to a request without a prompt, with which clients load a model, or unload it."""
    reason = "unload" if request.keep_alive in (0, "0") else "load"
    answer = Answer(model=request.model or "", created_at=now(), done=True, done_reason=reason)
    if is_chat:
        answer.message = AnswerMessage()
    else:
        answer.response = ""
    return Json(answer)


def _object(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:  # the answer ended within them
        return {}


def _token(token: str, logprob: float | None, top: dict[str, float] | None) -> TokenLogprob:
    others = [TopLogprob(token=text, logprob=value, bytes=[*text.encode()]) for text, value in (top or {}).items()]
    return TokenLogprob(token=token, logprob=logprob or 0.0, bytes=[*token.encode()], top_logprobs=others)
