"""Routes of Text Generation Inference."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core.sampling import MAX_ENTRIES, MAX_SEQUENCES
from penstock.serve.dialects.dispatch import answer_by_body
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.parse import parse
from penstock.serve.dialects.openai.requests import CompletionRequest
from penstock.serve.http.access import Access
from penstock.serve.http.body import convert, read_object
from penstock.serve.http.openapi import OBJECT, STRING, operation, reference
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModels
from penstock.version import __version__

from .convert import completion_fields
from .handler import TGIHandler
from .requests import CompatGenerateRequest, GenerateRequest
from .responses import ERROR_FORMAT, Generation, StreamToken

T = TypeVar("T", bound=GenerateRequest)
SCHEMAS = (GenerateRequest, CompatGenerateRequest, Generation, StreamToken)
PREFIX = "tgi."
"""Of the schemas' names in the OpenAPI document."""


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add them; vLLM's ``/generate`` is there already."""
    routes.describe(SCHEMAS, PREFIX)
    routes.error_formats.add(ERROR_FORMAT, "/generate_stream", "/info")
    routes.error_formats.add_exact(ERROR_FORMAT, "/")

    async def read(raw_request: Request, schema: type[T]) -> T:
        record = record_of(raw_request.scope)
        record.error_format = ERROR_FORMAT
        fields = {
            name: value
            for name, value in read_object(await served_models.read_body(raw_request)).items()
            if value is not None
        }
        if isinstance(given := fields.get("parameters"), dict):
            fields["parameters"] = {name: value for name, value in given.items() if value is not None}
        return convert(fields, schema, record.unknown)

    def answer(raw_request: Request, request: GenerateRequest, streamed: bool, as_list: bool = False) -> Response:
        service, record = served_models.find(request.parameters.adapter_id), record_of(raw_request.scope)
        fields = completion_fields(request, streamed)
        completions = CompletionHandler(service, record, parse(fields, CompletionRequest, record.unknown, lax=""))
        return Reply.of(service, TGIHandler(service, request, completions, as_list), ERROR_FORMAT, streamed)

    async def generate(raw_request: Request) -> Response:
        return answer(raw_request, await read(raw_request, GenerateRequest), streamed=False)

    async def generate_stream(raw_request: Request) -> Response:
        return answer(raw_request, await read(raw_request, GenerateRequest), streamed=True)

    async def compat_generate(raw_request: Request) -> Response:
        request = await read(raw_request, CompatGenerateRequest)
        return answer(raw_request, request, request.stream, as_list=True)

    async def info(_: Request) -> Response:
        service = served_models.find()
        model = next(model for model in served_models.models if model.name == service.name)
        longest = service.gateway.engine_pool.require_engine().max_model_len
        facts: dict[str, Any] = {
            "model_id": model.configuration.engine.model or service.name,
            "model_sha": None,
            "model_dtype": str(model.configuration.engine.dtype),
            "model_device_type": str(model.configuration.engine.device),
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": served_models.options.max_concurrency,
            "max_best_of": MAX_SEQUENCES,
            "max_stop_sequences": MAX_ENTRIES["stop"],
            "max_input_tokens": longest - 1,
            "max_total_tokens": longest,
            "max_client_batch_size": 1,
            "router": "penstock",
            "version": __version__,
        }
        return JSONResponse(facts)

    one, asked = reference(Generation, PREFIX), reference(GenerateRequest, PREFIX)
    streamed = operation(None, OBJECT, asked)
    streamed["responses"]["200"]["content"] = {"text/event-stream": {"schema": STRING}}
    for path, endpoint, summary, described in (
        ("/generate_stream", generate_stream, "Text Generation Inference's streamed generation", streamed),
        (
            "/",
            compat_generate,
            "Text Generation Inference's generation, streamed or not",
            operation({"type": "array", "items": one}, OBJECT, reference(CompatGenerateRequest, PREFIX), streamed=True),
        ),
    ):
        described["responses"]["422"] = described["responses"]["400"]
        routes.add(path, endpoint, access=Access.INFERENCE, method="POST", summary=summary, described=described)
    summary = "Text Generation Inference's description of the model"
    routes.add("/info", info, access=Access.INFERENCE, summary=summary, described=operation(OBJECT, OBJECT))
    answer_by_body(routes, served_models, "/generate", lambda fields: "inputs" in fields, generate)
