"""Routes of OpenAI's API and vLLM's additions to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.core import Failure, SamplingParams
from penstock.core.errors import invalid
from penstock.serve.chat.messages import messages_of, template_options
from penstock.serve.chat.request import ChatRequest, PromptRequest
from penstock.serve.dialects.dispatch import Dialect
from penstock.serve.http.access import Access
from penstock.serve.http.body import read_object
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.form import read_form
from penstock.serve.http.openapi import STRING, operation, reference
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.messages import DEFAULT_NAME
from penstock.serve.models.served_models import ServedModels
from penstock.serve.models.service import ModelService

from .audio import SCHEMAS as AUDIO_SCHEMAS
from .audio import TranscriptionHandler, TranscriptionResponse, fields_of, read_request
from .chat import ChatHandler
from .completions import CompletionHandler
from .embeddings import EmbeddingHandler, PoolHandler
from .parse import parse
from .requests import (
    REQUESTS,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    PoolingRequest,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from .responses import (
    CHAT_FIELD_NAMES,
    DONE,
    FIELD_NAMES,
    RESPONSES,
    ChatCompletion,
    ClassifyResponse,
    Completion,
    DetokenizeResponse,
    EmbeddingResponse,
    ErrorResponse,
    Model,
    ModelList,
    PoolResponse,
    RerankResponse,
    ScoreResponse,
    TokenizeResponse,
    encode,
    error_of,
    event,
)
from .scores import ClassifyHandler, RerankHandler, ScoreHandler

TEXT = b"text/plain; charset=utf-8"
T = TypeVar("T", bound=msgspec.Struct)
P = TypeVar("P", bound=PoolingRequest)
Endpoint = Callable[[Request], Awaitable[Response]]


class Answering(Protocol):
    """A handler whose answer is one document."""

    def full(self) -> AsyncGenerator[bytes, None]: ...


class OpenAIErrorFormat(ErrorFormat):
    """OpenAI's error format.

    Args:
        names: internal field name → the request's.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def response(self, failure: Failure) -> ErrorResponse:
        return error_of(rename_field(failure, self._names))

    def error(self, failure: Failure) -> bytes:
        return encode(self.response(failure))

    def stream_error(self, failure: Failure) -> bytes:
        return event(self.response(failure)) + DONE


ERROR_FORMAT = OpenAIErrorFormat(FIELD_NAMES)
CHAT_ERROR_FORMAT = OpenAIErrorFormat(CHAT_FIELD_NAMES)
AUDIO_ERROR_FORMAT = OpenAIErrorFormat({**FIELD_NAMES, "audio": "file"})


class Json(Response):
    """A struct as JSON."""

    def __init__(self, answer: msgspec.Struct) -> None:
        super().__init__(encode(answer), media_type="application/json")


class OpenAI(Dialect):
    """The default dialect of the shared paths.

    Args:
        check: a further check of sampling parameters, which raises ``PenstockError``.
    """

    error_format = ERROR_FORMAT

    def __init__(self, served_models: ServedModels, check: Callable[[SamplingParams], None] | None = None) -> None:
        self._served_models = served_models
        self._check = check or (lambda sampling: None)

    def matches(self, raw_request: Request, fields: dict[str, Any]) -> bool:
        return True

    def completion(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        record = record_of(raw_request.scope)
        if fields.get("prompt_token_ids"):
            fields.setdefault("prompt", "")  # required by the schema, and not used
        request = parse_request(self._served_models, fields, CompletionRequest, raw_request)
        service = self._served_models.find(request.model)
        handler = CompletionHandler(service, record, request)
        self._check(handler.sampling)
        return Reply.of(service, handler, ERROR_FORMAT, request.stream)

    def chat(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        record = record_of(raw_request.scope)
        record.error_format = CHAT_ERROR_FORMAT
        request = parse_request(self._served_models, fields, ChatRequest, raw_request)
        service = self._served_models.find(request.model)
        handler = ChatHandler(service, record, request, size)
        self._check(handler.sampling)
        return Reply.of(service, handler, CHAT_ERROR_FORMAT, request.stream)


def parse_request(served_models: ServedModels, fields: dict[str, Any], schema: type[T], raw_request: Request) -> T:
    """``parse`` with the checks of ``require_model``, and the request's own ``request_id``."""
    if served_models.options.require_model and "model" in schema.__struct_fields__ and fields.get("model") is None:
        raise invalid("model", f"is missing; it is {' or '.join(service.name for service in served_models)}")
    record = record_of(raw_request.scope)
    request = parse(fields, schema, record.unknown)
    if (
        isinstance(request, PromptRequest)
        and request.request_id
        and record.request_id != raw_request.headers.get("x-request-id")
    ):
        record.request_id = request.request_id
    return request


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add all routes but completions and chats."""
    routes.error_formats.add_exact(routes.error_formats.default, "/v2/rerank")  # as vLLM; /v2 is KServe's
    routes.describe(SCHEMAS)

    async def read(raw_request: Request, schema: type[T], max_size: int | None = None) -> tuple[T, int]:
        def parsed(body: bytes) -> tuple[T, int]:
            return parse_request(served_models, read_object(body), schema, raw_request), len(body)

        return await served_models.read(raw_request, parsed, max_size)

    def pooling(schema: type[P], handler: Callable[[ModelService, RequestRecord, P], Answering]) -> Endpoint:
        async def endpoint(raw_request: Request) -> Response:
            def answer(body: bytes) -> Response:
                request = parse_request(served_models, read_object(body), schema, raw_request)
                service = served_models.find(request.model)
                answering = handler(service, record_of(raw_request.scope), request)
                return Reply(service, answering.full(), ERROR_FORMAT, streamed=False)

            return await served_models.read(raw_request, answer)

        return endpoint

    def model(service: ModelService, name: str) -> Model:
        adapter = None if name in service.names else service.gateway.engine_pool.adapters.get(name)
        engine = service.gateway.engine_pool.engine
        return Model(
            id=name,
            created=served_models.created,
            root=adapter or service.name,
            parent=None if name in service.names else service.name,
            max_model_len=engine.max_model_len if engine else None,
        )

    async def list_models(_: Request) -> Response:
        named = [(service, [*service.names, *service.gateway.engine_pool.adapters]) for service in served_models]
        return Json(ModelList(data=[model(service, name) for service, names in named for name in names]))

    async def retrieve_model(raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        service = served_models.find(name)
        return Json(model(service, service.name if name == DEFAULT_NAME else name))

    async def load_lora_adapter(raw_request: Request) -> Response:
        request, _ = await read(raw_request, LoadAdapterRequest)
        service = served_models.find(request.base_model_name)
        if request.lora_name == DEFAULT_NAME or any(request.lora_name in each.names for each in served_models.models):
            raise invalid("lora_name", f"{request.lora_name!r} is a model's own name")
        if any(request.lora_name in each.gateway.engine_pool.adapters for each in served_models):
            raise invalid("lora_name", f"{request.lora_name!r} is loaded already; unload it first")
        await service.gateway.engine_pool.load_adapter(request.lora_name, request.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload_lora_adapter(raw_request: Request) -> Response:
        request, _ = await read(raw_request, UnloadAdapterRequest)
        await served_models.find(request.lora_name).gateway.engine_pool.unload_adapter(request.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    async def tokenize(raw_request: Request) -> Response:
        request, size = await read(raw_request, TokenizeRequest, served_models.max_body_size)
        service = served_models.find(request.model)
        gateway = service.gateway
        tokenizer = gateway.input_processor.tokenizer
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if request.messages is not None:
            options = template_options(
                request, request.tools, gateway.input_processor.chats.response_formats().tools is not None
            )
            messages, client = messages_of(request.messages, service.sees_images), record_of(raw_request.scope).sender
            conversation = await gateway.chat_prompt(messages, size, options, client=client)
            tokens = conversation.token_ids
        else:
            tokens = await gateway.encode(request.prompt or "", request.add_special_tokens is not False)
        spelled = [tokenizer.id_to_token(token_id) for token_id in tokens] if request.return_token_strs else None
        maximum = gateway.engine_pool.require_engine().max_model_len
        return Json(TokenizeResponse(count=len(tokens), max_model_len=maximum, tokens=tokens, token_strs=spelled))

    async def detokenize(raw_request: Request) -> Response:
        request, _ = await read(raw_request, DetokenizeRequest)
        gateway = served_models.find(request.model).gateway
        if len(request.tokens) > (maximum := gateway.engine_pool.require_engine().max_model_len):
            raise invalid("tokens", f"{len(request.tokens)} are more than the {maximum} of the context", maximum)
        text = gateway.input_processor.tokenizer.decode(request.tokens, False)
        return Json(DetokenizeResponse(prompt=text, content=text))

    def audio(translate: bool) -> Endpoint:
        async def endpoint(raw_request: Request) -> Response:
            options, record = served_models.options, record_of(raw_request.scope)
            record.error_format = AUDIO_ERROR_FORMAT
            sizes = [each.gateway.input_processor.speech for each in served_models]
            largest = max([speech.max_file_size for speech in sizes if speech], default=served_models.max_body_size)
            async with read_form(raw_request, largest, options.client_timeout) as form:
                fields = fields_of(form.fields)
                record.memory = await served_models.body_memory.reserve(
                    record.sender, form.size, options.client_timeout
                )
                file = await form.file.read()
            request = read_request(fields, record, translate)
            if options.require_model and request.model is None:
                raise invalid("model", "is missing")
            service = served_models.find(request.model)
            handler = TranscriptionHandler(service, record, request, file, translate)
            if request.stream or handler.is_json:
                return Reply.of(service, handler, AUDIO_ERROR_FORMAT, request.stream)
            return Reply(service, handler.full(), AUDIO_ERROR_FORMAT, streamed=True, media_type=TEXT)

        return endpoint

    for path, translate, summary in (
        ("/v1/audio/transcriptions", False, "Transcribe an audio file"),
        ("/v1/audio/translations", True, "Translate an audio file into English"),
    ):
        described = _described(TranscriptionResponse, None)
        routes.add(path, audio(translate), access=Access.INFERENCE, method="POST", summary=summary, described=described)
    score, rerank = pooling(ScoreRequest, ScoreHandler), pooling(RerankRequest, RerankHandler)
    embed, classify = pooling(EmbeddingRequest, EmbeddingHandler), pooling(ClassifyRequest, ClassifyHandler)
    ranked = "Rank documents by their relevance to a query"
    for path, endpoint, schema, answer, summary in (
        ("/v1/embeddings", embed, EmbeddingRequest, EmbeddingResponse, "Embed texts or token ids"),
        *((path, score, ScoreRequest, ScoreResponse, "Score pairs of texts") for path in ("/score", "/v1/score")),
        *((path, rerank, RerankRequest, RerankResponse, ranked) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ("/classify", classify, ClassifyRequest, ClassifyResponse, "Classify texts"),
        ("/pooling", pooling(PoolRequest, PoolHandler), PoolRequest, PoolResponse, "Pooled hidden states of texts"),
        ("/tokenize", tokenize, TokenizeRequest, TokenizeResponse, "Token ids of a text or a chat"),
        ("/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse, "The text of token ids"),
    ):
        described = _described(answer, schema)
        routes.add(path, endpoint, access=Access.INFERENCE, method="POST", summary=summary, described=described)
    if served_models.options.allow_runtime_lora_updating:
        for path, update, named, summary in (
            ("/v1/load_lora_adapter", load_lora_adapter, LoadAdapterRequest, "Load a LoRA adapter"),
            ("/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapterRequest, "Unload a LoRA adapter"),
        ):
            described = _described(None, named)
            routes.add(path, update, access=Access.CONTROL, method="POST", summary=summary, described=described)
    add = partial(routes.add, access=Access.INFERENCE)
    add("/v1/models", list_models, summary="The models and adapters", described=_described(ModelList))
    add("/v1/models/{name:path}", retrieve_model, summary="A model or adapter", described=_described(Model))


def shared_paths() -> dict[str, dict[str, Any]]:
    """Operations of the OpenAPI document for the paths that other dialects share."""
    return {
        "/v1/completions": _described(Completion, CompletionRequest),
        "/v1/chat/completions": _described(ChatCompletion, ChatRequest),
    }


SCHEMAS = (*REQUESTS, *RESPONSES, *AUDIO_SCHEMAS)


def _described(answer: type | None, request: type | None = None) -> dict[str, Any]:
    """An operation for the OpenAPI document; without ``answer`` the response is plain text."""
    streamed = request in (CompletionRequest, ChatRequest)
    response_schema = reference(answer) if answer else None
    request_schema = reference(request) if request else None
    described = operation(response_schema, reference(ErrorResponse), request_schema, streamed)
    if answer is None:
        described["responses"]["200"]["content"] = {"text/plain": {"schema": STRING}}
    return described
