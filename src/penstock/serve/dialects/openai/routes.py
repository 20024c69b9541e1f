"""Routes of OpenAI's API, with vLLM's additions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.core import SamplingParams
from penstock.core.errors import invalid
from penstock.serve.chat.messages import messages_of, template_options
from penstock.serve.chat.request import ChatRequest, PromptRequest
from penstock.serve.dialects.dispatch import SharedPathDialect
from penstock.serve.dialects.endpoints import DialectRoutes
from penstock.serve.http.access import Access
from penstock.serve.http.body import RequestBody, convert
from penstock.serve.http.form import read_form
from penstock.serve.http.openapi import STRING, operation, reference
from penstock.serve.http.reply import Json, Reply
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Endpoint, Routes
from penstock.serve.models.messages import DEFAULT_NAME
from penstock.serve.models.served_models import ServedModel, ServedModels

from .audio import SCHEMAS as AUDIO_SCHEMAS
from .audio import TranscriptionHandler, TranscriptionResponse, fields_of, read_request
from .chat import ChatHandler
from .completions import CompletionHandler
from .embeddings import EmbeddingHandler, EmbeddingRequest, EmbeddingResponse, PoolHandler, PoolRequest, PoolResponse
from .pooling import PoolingHandler
from .schema import (
    CHAT_FIELD_NAMES,
    FIELD_NAMES,
    ChatCompletion,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorResponse,
    LoadAdapterRequest,
    Model,
    ModelList,
    OpenAIErrorFormat,
    TokenizeRequest,
    TokenizeResponse,
    UnloadAdapterRequest,
)
from .scores import (
    ClassifyHandler,
    ClassifyRequest,
    ClassifyResponse,
    RerankHandler,
    RerankRequest,
    RerankResponse,
    ScoreHandler,
    ScoreRequest,
    ScoreResponse,
)

TEXT = b"text/plain; charset=utf-8"
T = TypeVar("T", bound=RequestBody)

ERROR_FORMAT = OpenAIErrorFormat(FIELD_NAMES)
CHAT_ERROR_FORMAT = OpenAIErrorFormat(CHAT_FIELD_NAMES)
AUDIO_ERROR_FORMAT = OpenAIErrorFormat({**FIELD_NAMES, "audio": "file"})
POOLING: dict[str, tuple[type[RequestBody], type[PoolingHandler], type, str]] = {
    "/v1/embeddings": (EmbeddingRequest, EmbeddingHandler, EmbeddingResponse, "Embed texts or token ids"),
    **{path: (ScoreRequest, ScoreHandler, ScoreResponse, "Score pairs of texts") for path in ("/score", "/v1/score")},
    **{
        path: (RerankRequest, RerankHandler, RerankResponse, "Rank documents by their relevance to a query")
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    "/classify": (ClassifyRequest, ClassifyHandler, ClassifyResponse, "Classify texts"),
    "/pooling": (PoolRequest, PoolHandler, PoolResponse, "Pooled hidden states of texts"),
}
"""Path → request schema, handler, response schema and summary of a pooling endpoint."""
REQUESTS = (
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    ScoreRequest,
    RerankRequest,
    ClassifyRequest,
    PoolRequest,
    TokenizeRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
RESPONSES = (
    Completion,
    ChatCompletion,
    EmbeddingResponse,
    ScoreResponse,
    RerankResponse,
    ClassifyResponse,
    PoolResponse,
    ModelList,
    Model,
    TokenizeResponse,
    DetokenizeResponse,
    ErrorResponse,
)


class OpenAI(SharedPathDialect):
    """OpenAI's completions and chats: the default dialect of the shared paths.

    Args:
        check: additional check of the sampling parameters; raises ``PenstockError``.
    """

    error_format = ERROR_FORMAT
    chat_error_format = CHAT_ERROR_FORMAT
    completion_handler = CompletionHandler
    chat_handler = ChatHandler

    def __init__(self, served_models: ServedModels, check: Callable[[SamplingParams], None] | None = None) -> None:
        self._served_models = served_models
        self._check = check or (lambda sampling: None)

    def matches(self, raw_request: Request, fields: dict[str, Any]) -> bool:
        return True

    def completion(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        if fields.get("prompt_token_ids"):
            fields.setdefault("prompt", "")  # the schema requires prompt, but prompt_token_ids replaces it
        request = parse_request(self._served_models, fields, CompletionRequest, raw_request)
        service = self._served_models.find(request.model)
        handler = self.completion_handler(service, record_of(raw_request.scope), request)
        self._check(handler.sampling)
        return Reply.of(service, handler, self.error_format, request.stream)

    def chat(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        record = record_of(raw_request.scope)
        record.error_format = self.chat_error_format
        request = parse_request(self._served_models, fields, ChatRequest, raw_request)
        service = self._served_models.find(request.model)
        handler = self.chat_handler(service, record, request, size)
        self._check(handler.sampling)
        return Reply.of(service, handler, self.chat_error_format, request.stream)


def parse_request(served_models: ServedModels, fields: dict[str, Any], schema: type[T], raw_request: Request) -> T:
    """Convert the JSON object of a request; its ``request_id`` is used unless the header ``X-Request-Id`` has one.

    Raises ``PenstockError`` as ``convert`` does, and ``invalid`` without a model if ``require_model`` is set.
    """
    if served_models.options.require_model and "model" in schema.__struct_fields__ and fields.get("model") is None:
        raise invalid("model", f"is missing; must be {' or '.join(service.name for service in served_models)}")
    record = record_of(raw_request.scope)
    request = convert(fields, schema, record.unknown)
    if (
        isinstance(request, PromptRequest)
        and request.request_id
        and record.request_id != raw_request.headers.get("x-request-id")
    ):
        record.request_id = request.request_id
    return request


class OpenAIRoutes(DialectRoutes):
    """Routes that convert request bodies with ``parse_request``."""

    def convert(self, fields: dict[str, Any], schema: type[T], raw_request: Request) -> T:
        return parse_request(self.served_models, fields, schema, raw_request)


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add all routes of OpenAI's API except completions and chats (``dispatch.add_shared_routes``)."""
    routes.error_formats.add_exact(routes.error_formats.default, "/v2/rerank")  # KServe has all other /v2 paths
    schemas = (*REQUESTS, *RESPONSES, *AUDIO_SCHEMAS)
    api = OpenAIRoutes(routes, served_models, schemas=schemas, failure=ErrorResponse)

    def pooling(schema: type[T], handler: type[PoolingHandler]) -> Endpoint:
        def endpoint(request: Any, record: RequestRecord, size: int) -> Response:
            service = served_models.find(request.model)
            return Reply.of(service, handler(service, record, request), ERROR_FORMAT, False)

        return api.endpoint(schema, endpoint)

    def model(service: ServedModel, name: str) -> Model:
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
        return Json(ModelList(data=[model(each, name) for each in served_models.listed() for name in each.all_names]))

    async def retrieve_model(raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        service = served_models.find(name)
        return Json(model(service, service.name if name == DEFAULT_NAME else name))

    async def load_lora_adapter(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, LoadAdapterRequest)
        service = served_models.find(request.base_model_name)
        if request.lora_name == DEFAULT_NAME or any(request.lora_name in each.names for each in served_models.models):
            raise invalid("lora_name", f"{request.lora_name!r} is the name of a model; choose another name")
        if any(request.lora_name in each.gateway.engine_pool.adapters for each in served_models):
            raise invalid("lora_name", f"{request.lora_name!r} is already loaded; unload it first")
        async with service.keep_alive.loaded():
            await service.gateway.engine_pool.load_adapter(request.lora_name, request.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload_lora_adapter(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, UnloadAdapterRequest)
        service = served_models.find(request.lora_name)
        async with service.keep_alive.loaded():
            await service.gateway.engine_pool.unload_adapter(request.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    async def tokenize(raw_request: Request) -> Response:
        request, size = await api.read(raw_request, TokenizeRequest, media=True)
        service = served_models.find(request.model)
        gateway = service.gateway
        tokenizer = gateway.input_processor.tokenizer
        if (request.prompt is None) == (request.messages is None):
            found = "neither" if request.prompt is None else "both"
            raise invalid("prompt", f"give either prompt or messages; the request has {found}")
        if request.messages is not None:
            options = template_options(
                request, request.tools, gateway.input_processor.chats.response_formats().tools is not None
            )
            messages, client = messages_of(request.messages, service.sees_images), record_of(raw_request.scope).sender
            conversation = await gateway.chat_prompt(messages, size, options, client=client)
            tokens = conversation.token_ids
        else:
            tokens = await gateway.encode(request.prompt or "", request.add_special_tokens is not False)
        strings = [tokenizer.id_to_token(token_id) for token_id in tokens] if request.return_token_strs else None
        maximum = gateway.engine_pool.known_engine().max_model_len
        return Json(TokenizeResponse(count=len(tokens), max_model_len=maximum, tokens=tokens, token_strs=strings))

    async def detokenize(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, DetokenizeRequest)
        gateway = served_models.find(request.model).gateway
        if len(request.tokens) > (maximum := gateway.engine_pool.known_engine().max_model_len):
            raise invalid("tokens", f"{len(request.tokens)} tokens exceed the context length of {maximum}", maximum)
        text = gateway.input_processor.tokenizer.decode(request.tokens, False)
        return Json(DetokenizeResponse(prompt=text, content=text))

    def audio(translate: bool) -> Endpoint:
        async def endpoint(raw_request: Request) -> Response:
            options, record = served_models.options, record_of(raw_request.scope)
            record.error_format = AUDIO_ERROR_FORMAT
            processors = [each.gateway.input_processor.speech for each in served_models]
            max_size = max([each.max_file_size for each in processors if each], default=served_models.max_body_size)
            async with read_form(raw_request, max_size, options.client_timeout) as form:
                fields = fields_of(form.fields)
                record.memory = await served_models.body_memory.reserve(
                    record.sender, form.size, options.client_timeout
                )
                file = await form.file.read()
            request = read_request(fields, record, translate)
            if options.require_model and request.model is None:
                raise invalid("model", f"is missing; must be {' or '.join(each.name for each in served_models)}")
            service = served_models.find(request.model)
            handler = TranscriptionHandler(service, record, request, file, translate)
            if request.stream or handler.is_json:
                return Reply.of(service, handler, AUDIO_ERROR_FORMAT, request.stream)
            return Reply(service, handler.full(), AUDIO_ERROR_FORMAT, streamed=True, media_type=TEXT)

        return endpoint

    for path, (schema, handler, answer, summary) in POOLING.items():
        api.post(path, pooling(schema, handler), summary, schema, answer=answer)
    transcript = {"answer": TranscriptionResponse}
    api.post("/v1/audio/transcriptions", audio(False), "Transcribe an audio file", **transcript)
    api.post("/v1/audio/translations", audio(True), "Translate an audio file into English", **transcript)
    api.post("/tokenize", tokenize, "Tokenize a text or a chat", TokenizeRequest, answer=TokenizeResponse)
    api.post("/detokenize", detokenize, "Detokenize token ids", DetokenizeRequest, answer=DetokenizeResponse)
    if served_models.options.allow_runtime_lora_updating:
        for path, update, schema, summary in (
            ("/v1/load_lora_adapter", load_lora_adapter, LoadAdapterRequest, "Load a LoRA adapter"),
            ("/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapterRequest, "Unload a LoRA adapter"),
        ):
            described = api.add(path, update, summary, None, schema, method="POST", access=Access.CONTROL)
            described["responses"]["200"]["content"] = {"text/plain": {"schema": STRING}}
    api.add("/v1/models", list_models, "List models and adapters", ModelList)
    api.add("/v1/models/{name:path}", retrieve_model, "Retrieve a model or adapter", Model)


def shared_paths() -> dict[str, dict[str, Any]]:
    """Path → OpenAPI operation of the paths that several dialects share."""
    return {
        path: operation(reference(answer), reference(ErrorResponse), reference(request), streamed=True)
        for path, answer, request in (
            ("/v1/completions", Completion, CompletionRequest),
            ("/v1/chat/completions", ChatCompletion, ChatRequest),
        )
    }
