"""Routes of Ollama's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core import Code, PenstockError
from penstock.serve.chat.request import ChatRequest as OpenAIChatRequest
from penstock.serve.dialects.openai.chat import ChatHandler
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.parse import parse
from penstock.serve.dialects.openai.requests import CompletionRequest
from penstock.serve.http.access import Access
from penstock.serve.http.body import convert, read_object
from penstock.serve.http.openapi import OBJECT, operation, reference
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Routes
from penstock.serve.http.unknown_fields import UnknownFields
from penstock.serve.models.served_models import ServedModels
from penstock.serve.models.service import ModelService

from .convert import chat_fields, generate_fields
from .embeddings import OllamaEmbeddingHandler
from .handler import OllamaHandler, calls_of, chat_pieces, raw_pieces
from .models import OllamaModels
from .requests import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, OllamaRequest, ShowRequest
from .responses import ERROR_FORMAT, MEDIA_TYPE, Answer, AnswerMessage, Embeddings, encode, now

T = TypeVar("T", bound=OllamaRequest)
Answering = Callable[[Request, bytes], Response | Awaitable[Response]]
SCHEMAS = (ChatRequest, GenerateRequest, EmbedRequest, EmbeddingsRequest, ShowRequest, Answer)
VERSION = "0.12.6"
"""Version of Ollama whose API this is: clients ask for it to know what they may use."""
UNSUPPORTED = ("create", "copy", "delete", "push")
PREFIX = "ollama."
"""Of the schemas' names in the OpenAPI document."""


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add the paths below ``/api``."""
    routes.describe(SCHEMAS, PREFIX)
    routes.error_formats.add(ERROR_FORMAT, "/api/")
    models = OllamaModels(served_models)

    async def read(raw_request: Request, schema: type[T]) -> T:
        unknown = record_of(raw_request.scope).unknown
        return await served_models.read(raw_request, lambda body: parsed(body, schema, unknown))

    def parsed(body: bytes, schema: type[T], unknown: UnknownFields) -> T:
        given = {name: value for name, value in read_object(body).items() if value is not None}
        return convert(given, schema, unknown)

    async def chat(raw_request: Request) -> Response:
        record = record_of(raw_request.scope)
        return await served_models.read(
            raw_request, lambda body: answer_chat(body, record), served_models.max_body_size
        )

    def answer_chat(body: bytes, record: RequestRecord) -> Response:
        request = parsed(body, ChatRequest, record.unknown)
        service = models.find(request.model)
        if not request.messages:
            return _loaded(request, is_chat=True)
        fields = chat_fields(request, record.unknown)
        handler = _chat_handler(service, record, models.name_of(request.model or ""), fields, len(body))
        answer = OllamaHandler(request.model or "", chat_pieces(handler), True, calls_of(handler))
        return Reply.of(service, answer, ERROR_FORMAT, request.stream is not False, MEDIA_TYPE)

    async def generate(raw_request: Request) -> Response:
        record = record_of(raw_request.scope)
        return await served_models.read(
            raw_request, lambda body: answer_prompt(body, record), served_models.max_body_size
        )

    def answer_prompt(body: bytes, record: RequestRecord) -> Response:
        request = parsed(body, GenerateRequest, record.unknown)
        service = models.find(request.model)
        if not request.prompt and not request.suffix and not request.images:
            return _loaded(request, is_chat=False)
        fields = generate_fields(request, record.unknown)
        if request.raw or request.suffix:
            longest = service.gateway.engine_pool.require_engine().max_model_len
            fields = {"max_tokens": longest} | fields | {"model": models.name_of(request.model or "")}
            pieces = raw_pieces(
                CompletionHandler(service, record, parse(fields, CompletionRequest, record.unknown, "numbers"))
            )
        else:
            name = models.name_of(request.model or "")
            pieces = chat_pieces(_chat_handler(service, record, name, fields, len(body)))
        answer = OllamaHandler(request.model or "", pieces, False)
        return Reply.of(service, answer, ERROR_FORMAT, request.stream is not False, MEDIA_TYPE)

    def embedding(schema: type[EmbedRequest] | type[EmbeddingsRequest]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(raw_request: Request) -> Response:
            request = await read(raw_request, schema)
            service = models.find(request.model)
            name = models.name_of(request.model or "")
            if isinstance(request, EmbedRequest) and not request.input and isinstance(request.input, list):
                none = Embeddings(model=request.model or name, embeddings=[], total_duration=0, prompt_eval_count=0)
                return Response(encode(none), media_type="application/json")
            handler = OllamaEmbeddingHandler(service, record_of(raw_request.scope), request, name)
            return Reply(service, handler.full(), ERROR_FORMAT, streamed=False)

        return endpoint

    async def tags(_: Request) -> Response:
        return JSONResponse({"models": models.listed()})

    async def running(_: Request) -> Response:
        return JSONResponse({"models": models.running()})

    async def show(raw_request: Request) -> Response:
        request = await read(raw_request, ShowRequest)
        return JSONResponse(models.shown(request.model or request.name))

    async def pull(raw_request: Request) -> Response:
        request = await read(raw_request, ShowRequest)
        models.find(request.model or request.name)  # what is served is there already
        return Response(encode({"status": "success"}) + b"\n", media_type=MEDIA_TYPE.decode())

    async def version(_: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def unsupported(raw_request: Request) -> Response:
        message = f"{raw_request.url.path}: models are chosen where the server is started (penstock serve --model)"
        raise PenstockError(Code.UNSUPPORTED, message)

    failure: dict[str, Any] = OBJECT
    add = partial(routes.add, access=Access.INFERENCE)
    for path, endpoint, schema, answer, summary in (
        ("chat", chat, ChatRequest, Answer, "Ollama's chat"),
        ("generate", generate, GenerateRequest, Answer, "Ollama's continuation of a prompt"),
        ("embed", embedding(EmbedRequest), EmbedRequest, None, "Ollama's embeddings of texts"),
        ("embeddings", embedding(EmbeddingsRequest), EmbeddingsRequest, None, "Ollama's embedding of one text"),
        ("show", show, ShowRequest, None, "Ollama's description of a model"),
        ("pull", pull, ShowRequest, None, "Ollama's download, which finds models that are served"),
    ):
        given = reference(answer, PREFIX) if answer else OBJECT
        described = operation(given, failure, reference(schema, PREFIX))
        add(f"/api/{path}", endpoint, method="POST", summary=summary, described=described)
    for path, state, summary in (
        ("tags", tags, "Ollama's list of models"),
        ("ps", running, "Ollama's list of loaded models"),
        ("version", version, "The version of Ollama's API"),
    ):
        add(f"/api/{path}", state, summary=summary, described=operation(OBJECT, failure))
    for path in UNSUPPORTED:
        method = "DELETE" if path == "delete" else "POST"
        summary = f"Ollama's {path}, which is refused"
        described = operation(OBJECT, failure)
        add(f"/api/{path}", unsupported, method=method, summary=summary, described=described)


def _chat_handler(
    service: ModelService, record: RequestRecord, name: str, fields: dict[str, Any], size: int
) -> ChatHandler:
    fields["model"] = name
    return ChatHandler(service, record, parse(fields, OpenAIChatRequest, record.unknown, "numbers"), size)


def _loaded(request: ChatRequest | GenerateRequest, is_chat: bool) -> Response:
    """The answer to a request without a prompt, with which clients load a model, or unload it."""
    reason = "unload" if request.keep_alive in (0, "0") else "load"
    answer = Answer(model=request.model or "", created_at=now(), done=True, done_reason=reason)
    if is_chat:
        answer.message = AnswerMessage()
    else:
        answer.response = ""
    return Response(encode(answer), media_type="application/json")
