"""Routes of OpenAI's API and vLLM's additions to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from penstock.core import Failure, SamplingParams
from penstock.core.errors import invalid
from penstock.serve.chat.messages import messages_of, template_options
from penstock.serve.chat.request import ChatRequest, Truncated
from penstock.serve.dialects.dispatch import Dialect
from penstock.serve.http.body import read_object
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.openapi import STRING, operation, reference
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import record_of
from penstock.serve.models.messages import DEFAULT_NAME
from penstock.serve.models.registry import ModelRegistry
from penstock.serve.models.service import ModelService

from .chat import ChatHandler
from .completions import CompletionHandler
from .embeddings import EmbeddingHandler, ScoreHandler
from .parse import parse
from .requests import (
    REQUESTS,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from .responses import (
    ANSWERS,
    DONE,
    OF_ALL,
    OF_CHATS,
    Chat,
    Completion,
    Detokenized,
    Embeddings,
    ErrorAnswer,
    Model,
    Models,
    Scores,
    Tokenized,
    encode,
    error_of,
    event,
)

T = TypeVar("T", bound=msgspec.Struct)


class OpenAIErrorFormat(ErrorFormat):
    """OpenAI's error format.

    Args:
        names: internal field name → the request's.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def error(self, failure: Failure) -> bytes:
        return encode(error_of(rename_field(failure, self._names)))

    def stream_error(self, failure: Failure) -> bytes:
        return event(error_of(rename_field(failure, self._names))) + DONE


ERROR_FORMAT = OpenAIErrorFormat(OF_ALL)
CHAT_ERROR_FORMAT = OpenAIErrorFormat(OF_CHATS)


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

    def __init__(self, registry: ModelRegistry, check: Callable[[SamplingParams], None] | None = None) -> None:
        self._registry = registry
        self._check = check or (lambda sampling: None)

    def speaks(self, request: Request, found: dict[str, Any]) -> bool:
        return True

    def completion(self, request: Request, found: dict[str, Any], size: int) -> Response:
        record = record_of(request.scope)
        if found.get("prompt_token_ids"):
            found.setdefault("prompt", "")  # required by the schema, and not used
        wanted = _parse(self._registry, found, CompletionRequest, request)
        service = self._registry.find(wanted.model)
        handler = CompletionHandler(service, record, wanted)
        self._check(handler.sampling)
        return Reply.of(service, handler, ERROR_FORMAT, wanted.stream)

    def chat(self, request: Request, found: dict[str, Any], size: int) -> Response:
        record = record_of(request.scope)
        record.error_format = CHAT_ERROR_FORMAT
        wanted = _parse(self._registry, found, ChatRequest, request)
        service = self._registry.find(wanted.model)
        handler = ChatHandler(service, record, wanted, size)
        self._check(handler.sampling)
        return Reply.of(service, handler, CHAT_ERROR_FORMAT, wanted.stream)


def _parse(registry: ModelRegistry, found: dict[str, Any], schema: type[T], request: Request) -> T:
    """``parse`` with the checks of ``require_model``, and the request's own ``request_id``."""
    if registry.options.require_model and "model" in schema.__struct_fields__ and found.get("model") is None:
        raise invalid("model", f"is missing; it is {' or '.join(service.name for service in registry)}")
    record = record_of(request.scope)
    wanted = parse(found, schema, record.unknown)
    if isinstance(wanted, Truncated) and wanted.request_id and record.request_id != request.headers.get("x-request-id"):
        record.request_id = wanted.request_id
    return wanted


def add_routes(app: FastAPI, registry: ModelRegistry) -> None:
    """Add all routes but completions and chats."""

    async def read(request: Request, schema: type[T]) -> tuple[T, int]:
        body = await registry.read(request)
        return _parse(registry, read_object(body), schema, request), len(body)

    async def create_embedding(request: Request) -> Response:
        wanted, _ = await read(request, EmbeddingRequest)
        service = registry.find(wanted.model)
        handler = EmbeddingHandler(service, record_of(request.scope), wanted)
        return Reply(service, handler.full(), ERROR_FORMAT, streamed=False)

    async def create_score(request: Request) -> Response:
        wanted, _ = await read(request, ScoreRequest)
        service = registry.find(wanted.model)
        handler = ScoreHandler(service, record_of(request.scope), wanted)
        return Reply(service, handler.full(), ERROR_FORMAT, streamed=False)

    def model(service: ModelService, name: str) -> Model:
        parent = None if name in service.names else service.name
        engine = service.gateway.engine.engine
        longest = engine.max_model_len if engine else None
        return Model(id=name, created=registry.created, root=service.name, parent=parent, max_model_len=longest)

    async def list_models() -> Response:
        named = [(service, [*service.names, *service.gateway.engine.adapters]) for service in registry]
        return Json(Models(data=[model(service, name) for service, names in named for name in names]))

    async def retrieve_model(name: str) -> Response:
        service = registry.find(name)
        return Json(model(service, service.name if name == DEFAULT_NAME else name))

    async def load_lora_adapter(request: Request) -> Response:
        wanted, _ = await read(request, LoadAdapterRequest)
        service = registry.find(wanted.base_model_name)
        if wanted.lora_name == DEFAULT_NAME or any(wanted.lora_name in each.names for each in registry.models):
            raise invalid("lora_name", f"{wanted.lora_name!r} is a model's own name")
        if any(wanted.lora_name in each.gateway.engine.adapters for each in registry):
            raise invalid("lora_name", f"{wanted.lora_name!r} is loaded already; unload it first")
        await service.gateway.engine.load_adapter(wanted.lora_name, wanted.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")

    async def unload_lora_adapter(request: Request) -> Response:
        wanted, _ = await read(request, UnloadAdapterRequest)
        await registry.find(wanted.lora_name).gateway.engine.unload_adapter(wanted.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")

    async def tokenize(request: Request) -> Response:
        wanted, size = await read(request, TokenizeRequest)
        gateway = registry.find(wanted.model).gateway
        tokenizer = gateway.input_processor.tokenizer
        if (wanted.prompt is None) == (wanted.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if wanted.messages is not None:
            options = template_options(wanted, gateway.input_processor.response_formats().tools is not None)
            conversation = await gateway.chat_prompt(messages_of(wanted.messages), size, options)
            tokens = await gateway.encode(conversation)
        else:
            tokens = await gateway.encode(wanted.prompt or "", wanted.add_special_tokens is not False)
        spelled = [tokenizer.token(token_id) for token_id in tokens] if wanted.return_token_strs else None
        most = gateway.engine.check().max_model_len
        return Json(Tokenized(count=len(tokens), max_model_len=most, tokens=tokens, token_strs=spelled))

    async def detokenize(request: Request) -> Response:
        wanted, _ = await read(request, DetokenizeRequest)
        gateway = registry.find(wanted.model).gateway
        if len(wanted.tokens) > (most := gateway.engine.check().max_model_len):
            raise invalid("tokens", f"{len(wanted.tokens)} are more than the {most} of the context", most)
        return Json(Detokenized(prompt=gateway.input_processor.tokenizer.decode(wanted.tokens, False)))

    for path, endpoint, schema, answer in (
        ("/v1/embeddings", create_embedding, EmbeddingRequest, Embeddings),
        ("/score", create_score, ScoreRequest, Scores),
        ("/v1/score", create_score, ScoreRequest, Scores),
        ("/tokenize", tokenize, TokenizeRequest, Tokenized),
        ("/detokenize", detokenize, DetokenizeRequest, Detokenized),
    ):
        app.add_api_route(
            path, endpoint, methods=["POST"], openapi_extra=_described(answer, schema), response_class=Response
        )
    if registry.options.allow_runtime_lora_updating:
        for path, update, named in (
            ("/v1/load_lora_adapter", load_lora_adapter, LoadAdapterRequest),
            ("/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapterRequest),
        ):
            app.add_api_route(
                path, update, methods=["POST"], openapi_extra=_described(None, named), response_class=Response
            )
    app.add_api_route("/v1/models", list_models, openapi_extra=_described(Models), response_class=Response)
    app.add_api_route(
        "/v1/models/{name:path}", retrieve_model, openapi_extra=_described(Model), response_class=Response
    )


def shared_paths() -> dict[str, dict[str, Any]]:
    """Operations of the OpenAPI document for the paths that other dialects share."""
    return {
        "/v1/completions": _described(Completion, CompletionRequest),
        "/v1/chat/completions": _described(Chat, ChatRequest),
    }


SCHEMAS = (*REQUESTS, *ANSWERS)


def _described(answer: type | None, request: type | None = None) -> dict[str, Any]:
    """An operation for the OpenAPI document; without ``answer`` the response is plain text."""
    streamed = request in (CompletionRequest, ChatRequest)
    told = reference(answer) if answer else None
    asked = reference(request) if request else None
    described = operation(told, reference(ErrorAnswer), asked, streamed)
    if answer is None:
        described["responses"]["200"]["content"] = {"text/plain": {"schema": STRING}}
    return described
