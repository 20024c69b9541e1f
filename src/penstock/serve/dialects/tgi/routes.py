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
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Endpoint, Routes
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

    def read(body: bytes, schema: type[T], record: RequestRecord) -> T:
        fields = {name: value for name, value in read_object(body).items() if value is not None}
        if isinstance(given := fields.get("parameters"), dict):
            fields["parameters"] = {name: value for name, value in given.items() if value is not None}
        return convert(fields, schema, record.unknown)

    def answer(request: GenerateRequest, record: RequestRecord, streamed: bool, as_list: bool = False) -> Response:
        service = served_models.find(request.parameters.adapter_id)
        fields = completion_fields(request, streamed)
        completions = CompletionHandler(service, record, parse(fields, CompletionRequest, record.unknown, lax=""))
        return Reply.of(service, TGIHandler(service, request, completions, as_list), ERROR_FORMAT, streamed)

    def generating(streamed: bool) -> Endpoint:
        async def generate(raw_request: Request) -> Response:
            record = record_of(raw_request.scope)
            record.error_format = ERROR_FORMAT
            return await served_models.read(
                raw_request, lambda body: answer(read(body, GenerateRequest, record), record, streamed)
            )

        return generate

    generate, generate_stream = generating(streamed=False), generating(streamed=True)

    async def compat_generate(raw_request: Request) -> Response:
        record = record_of(raw_request.scope)
        record.error_format = ERROR_FORMAT

        def answer_compat(body: bytes) -> Response:
            request = read(body, CompatGenerateRequest, record)
            return answer(request, record, request.stream, as_list=True)

        return await served_models.read(raw_request, answer_compat)

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
