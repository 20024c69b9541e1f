"""Routes of llama-server's API."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core import Code, PenstockError
from penstock.serve.chat.messages import messages_of, template_options
from penstock.serve.dialects.dispatch import answer_by_body
from penstock.serve.dialects.openai import requests as openai
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.parse import parse
from penstock.serve.http.access import Access
from penstock.serve.http.body import read_object
from penstock.serve.http.openapi import OBJECT, operation, reference
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModels
from penstock.text.infill import infill_format

from .convert import generation_fields, prompts_of, read
from .embeddings import LlamaServerEmbeddingHandler
from .handler import LlamaServerHandler
from .requests import (
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    InfillRequest,
    TemplateRequest,
    TokenizeRequest,
)
from .responses import ERROR_FORMAT, ERROR_PATHS, Answer
from .state import props, slots

T = TypeVar("T", bound=msgspec.Struct)
SCHEMAS = (CompletionRequest, InfillRequest, EmbeddingRequest, TemplateRequest, TokenizeRequest, Answer)
PREFIX = "llama_server."
"""Of the schemas' names in the OpenAPI document."""


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add them; those of vLLM with the same paths are there already."""
    routes.describe(SCHEMAS, PREFIX)
    routes.error_formats.add(ERROR_FORMAT, *ERROR_PATHS)

    async def read_request(raw_request: Request, schema: type[T]) -> tuple[T, int]:
        record = record_of(raw_request.scope)
        record.error_format = ERROR_FORMAT
        return await served_models.read(
            raw_request,
            lambda body: (read(read_object(body), schema, record.unknown), len(body)),
            served_models.max_body_size if schema is TemplateRequest else None,
        )

    async def answer(
        raw_request: Request,
        request: GenerationRequest,
        prompts: list[str] | list[list[int]],
        as_list: bool,
        ends: tuple[int, ...] = (),
    ) -> Response:
        service, record = served_models.find(request.model), record_of(raw_request.scope)
        fields = await generation_fields(request, service.gateway) | {"prompt": prompts}
        if ends:
            fields["stop_token_ids"] = [*ends]
        given = {name: value for name, value in fields.items() if value is not None}
        completions = CompletionHandler(
            service, record, parse(given, openai.CompletionRequest, record.unknown, "numbers")
        )
        handler = LlamaServerHandler(service, request, completions, as_list)
        return Reply.of(service, handler, ERROR_FORMAT, request.stream)

    async def completion(raw_request: Request) -> Response:
        request, _ = await read_request(raw_request, CompletionRequest)
        prompts = await prompts_of(request.prompt, served_models.find(request.model).gateway)
        several = isinstance(request.prompt, list) and not any(isinstance(part, int) for part in request.prompt)
        return await answer(raw_request, request, prompts, several)

    async def infill(raw_request: Request) -> Response:
        request, _ = await read_request(raw_request, InfillRequest)
        gateway = served_models.find(request.model).gateway
        ends = infill_format(gateway.input_processor.tokenizer).ends
        files = [(file.filename, file.text) for file in request.input_extra]
        token_ids = await gateway.encode_infill(request.input_prefix, request.input_suffix, files=files)
        token_ids += await gateway.encode(request.prompt, False)
        return await answer(raw_request, request, [token_ids], False, ends)

    async def embedding(raw_request: Request) -> Response:
        request, _ = await read_request(raw_request, EmbeddingRequest)
        service = served_models.find(request.model)
        prompts: Any = await prompts_of(request.content, service.gateway, "content")
        converted = openai.EmbeddingRequest(input=prompts, model=request.model)
        handler = LlamaServerEmbeddingHandler(service, record_of(raw_request.scope), converted)
        return Reply(service, handler.full(), ERROR_FORMAT, streamed=False)

    async def apply_template(raw_request: Request) -> Response:
        request, size = await read_request(raw_request, TemplateRequest)
        service = served_models.find(request.model)
        gateway = service.gateway
        options = template_options(
            request, request.tools, gateway.input_processor.chats.response_formats().tools is not None
        )
        messages, client = messages_of(request.messages, service.sees_images), record_of(raw_request.scope).sender
        conversation = await gateway.chat_prompt(messages, size, options, client=client)
        return JSONResponse({"prompt": conversation.text})

    async def tokenize(raw_request: Request) -> Response:
        request, _ = await read_request(raw_request, TokenizeRequest)
        gateway = served_models.find(request.model).gateway
        tokens: list[Any] = [*await gateway.encode(request.content, bool(request.add_special))]
        if request.with_pieces:
            vocabulary = gateway.input_processor.tokenizer.vocabulary
            tokens = [{"id": token_id, "piece": _piece(vocabulary[token_id])} for token_id in tokens]
        return JSONResponse({"tokens": tokens})

    async def get_props(raw_request: Request) -> Response:
        return JSONResponse(props(served_models, served_models.find(raw_request.query_params.get("model"))))

    async def change_props(_: Request) -> Response:
        message = "/props: options are chosen where the server is started (penstock serve --help)"
        raise PenstockError(Code.UNSUPPORTED, message)

    async def get_slots(raw_request: Request) -> Response:
        return JSONResponse(slots(served_models, served_models.find(raw_request.query_params.get("model"))))

    one = reference(Answer, PREFIX)
    whole = {"anyOf": [one, {"type": "array", "items": one}]}
    objects = {"type": "array", "items": OBJECT}
    for path, endpoint, schema, described, summary in (
        ("/completion", completion, CompletionRequest, whole, "llama-server's completion"),
        ("/completions", completion, CompletionRequest, whole, "llama-server's completion"),
        ("/infill", infill, InfillRequest, one, "llama-server's code between a prefix and a suffix"),
        ("/embedding", embedding, EmbeddingRequest, objects, "llama-server's embeddings"),
        ("/apply-template", apply_template, TemplateRequest, OBJECT, "llama-server's prompt of a chat"),
    ):
        described = operation(described, OBJECT, reference(schema, PREFIX))
        routes.add(path, endpoint, access=Access.INFERENCE, method="POST", summary=summary, described=described)
    for path, state, described, summary in (
        ("/props", get_props, OBJECT, "llama-server's properties of a model"),
        ("/slots", get_slots, objects, "llama-server's slots"),
    ):
        described = operation(described, OBJECT, query=("model",))
        routes.add(path, state, access=Access.INFERENCE, summary=summary, described=described)
    summary = "llama-server's change of options, which is refused"
    change = operation(OBJECT, OBJECT)
    routes.add("/props", change_props, access=Access.INFERENCE, method="POST", summary=summary, described=change)
    answer_by_body(routes, served_models, "/tokenize", lambda fields: "content" in fields, tokenize)


def _piece(token: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are none."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return [*token]
