"""Routes of Text Generation Inference."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.sampling import MAX_ENTRIES, MAX_SEQUENCES
from penstock.frontend.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from penstock.serve.dialects.dispatch import dispatch_by_body
from penstock.serve.dialects.endpoints import DialectRoutes
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.schema import MIN_LOGPROB, CompletionRequest
from penstock.serve.generation import likeliest
from penstock.serve.http.body import RequestBody, convert
from penstock.serve.http.openapi import STRING, reference
from penstock.serve.http.reply import Reply, encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModel, ServedModels
from penstock.version import __version__

from .schema import (
    ERROR_FORMAT,
    CompatGenerateRequest,
    Details,
    GenerateRequest,
    Generation,
    Grammar,
    Parameters,
    PromptToken,
    StreamDetails,
    StreamToken,
    Token,
    reason_of,
)

T = TypeVar("T", bound=RequestBody)
SCHEMAS = (GenerateRequest, CompatGenerateRequest, Generation, StreamToken)
PREFIX = "tgi."
"""Prefix of schema names in the OpenAPI document."""
MAX_NEW_TOKENS = 100
"""Default of ``max_new_tokens``, as in TGI."""
NAMES = {
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "truncate": "truncate_prompt_tokens",
    "adapter_id": "model",
}
"""TGI parameter → field of OpenAI's completion request."""
SAMPLING = ("temperature", "top_k", "top_p")


class TGIHandler(CompletionHandler):
    """Handler of one generate request.

    Args:
        request: the request, converted to OpenAI's completion request.
        tgi_request: the original request.
        as_list: respond with a list of one generation, as ``/`` does.
    """

    def __init__(
        self,
        service: ServedModel,
        record: RequestRecord,
        request: CompletionRequest,
        tgi_request: GenerateRequest,
        as_list: bool,
    ) -> None:
        super().__init__(service, record, request)
        self.parameters = tgi_request.parameters
        self._inputs = tgi_request.inputs
        self._as_list = as_list
        self._num_tokens = 0
        """Number of tokens sent so far."""

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        answer = Generation(generated_text=self._text(outputs[0].outputs[0]))
        if self.parameters.details or self.parameters.decoder_input_details:
            answer.details = self._details(outputs[0])
        return encode([answer] if self._as_list else answer)

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        """Encode one event per token. Text that may still change (UTF-8, stop strings) is sent with a later token."""
        completion = output.outputs[0]
        if (delta := self.cursors[0].advance(completion)) is None:
            return b""
        tokens = [self._sampled(position) for position in delta.positions]
        _spread(tokens, delta.text)
        events = []
        for token, position in zip(tokens, delta.positions, strict=True):
            self._num_tokens += 1
            top = self._top(position) or UNSET
            events.append(StreamToken(index=self._num_tokens, token=token, top_tokens=top))
        if events and completion.finished:
            events[-1].generated_text = self._text(completion)
            events[-1].details = self._stream_details(output)
        return b"".join([b"data:" + encode(event) + b"\n\n" for event in events])

    def format_end(self) -> bytes:
        return b""

    def _text(self, completion: CompletionOutput) -> str:
        return self._inputs + completion.text if self.parameters.return_full_text else completion.text

    def _details(self, output: RequestOutput) -> Details:
        completion = output.outputs[0]
        positions = completion.logprobs or []
        with_top = bool(self.parameters.top_n_tokens)
        return Details(
            finish_reason=reason_of(completion),
            generated_tokens=len(completion.token_ids),
            seed=self.parameters.seed,
            prefill=self._prefill(output) if self.parameters.decoder_input_details else [],
            tokens=[self._sampled(position) for position in positions],
            top_tokens=[self._top(position) for position in positions] if with_top and positions else UNSET,
        )

    def _stream_details(self, output: RequestOutput) -> StreamDetails:
        completion = output.outputs[0]
        return StreamDetails(
            finish_reason=reason_of(completion),
            generated_tokens=len(completion.token_ids),
            seed=self.parameters.seed,
            input_length=len(output.prompt_token_ids),
        )

    def _prefill(self, output: RequestOutput) -> list[PromptToken]:
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        return [
            PromptToken(
                id=token_id,
                text=self.tokenizer.decode_token(token_id),
                logprob=max(position[token_id].logprob, MIN_LOGPROB) if position else None,
            )
            for token_id, position in pairs
        ]

    def _sampled(self, position: PositionLogprobs) -> Token:
        return self._token(*next(iter(position.items())))

    def _top(self, position: PositionLogprobs) -> list[Token]:
        """The most likely tokens at a position (``top_n_tokens``)."""
        return [self._token(*entry) for entry in likeliest(position, self.parameters.top_n_tokens or 0)]

    def _token(self, token_id: int, entry: Logprob) -> Token:
        logprob, is_special = max(entry.logprob, MIN_LOGPROB), token_id in self.tokenizer.special_ids
        return Token(id=token_id, text=entry.decoded_token, logprob=logprob, special=is_special)


class TGIRoutes(DialectRoutes):
    """Routes of TGI. Null fields of ``parameters`` are dropped when a request is converted."""

    def convert(self, fields: dict[str, Any], schema: type[T], raw_request: Request) -> T:
        if isinstance(given := fields.get("parameters"), dict):
            fields["parameters"] = {name: value for name, value in given.items() if value is not None}
        return super().convert(fields, schema, raw_request)


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add TGI's routes. vLLM's ``/generate`` must have been added before, as both share the path."""
    routes.error_formats.add(ERROR_FORMAT, "/generate_stream", "/info")
    routes.error_formats.add_exact(ERROR_FORMAT, "/")
    api = TGIRoutes(routes, served_models, ERROR_FORMAT, SCHEMAS, PREFIX)

    def reply(request: GenerateRequest, record: RequestRecord, streamed: bool, as_list: bool = False) -> Response:
        service = served_models.find(request.parameters.adapter_id)
        completion = convert(completion_fields(request, streamed), CompletionRequest, record.unknown, "")
        handler = TGIHandler(service, record, completion, request, as_list)
        return Reply.of(service, handler, ERROR_FORMAT, streamed)

    def generate(request: GenerateRequest, record: RequestRecord, size: int) -> Response:
        return reply(request, record, streamed=False)

    def generate_stream(request: GenerateRequest, record: RequestRecord, size: int) -> Response:
        return reply(request, record, streamed=True)

    def compat_generate(request: CompatGenerateRequest, record: RequestRecord, size: int) -> Response:
        return reply(request, record, request.stream, as_list=True)

    async def info(_: Request) -> Response:
        service = served_models.find()
        max_model_len = service.gateway.engine_pool.known_engine().max_model_len
        fields: dict[str, Any] = {
            "model_id": service.configuration.engine.model or service.name,
            "model_sha": None,
            "model_dtype": str(service.configuration.engine.dtype),
            "model_device_type": str(service.configuration.engine.device),
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": served_models.options.max_concurrency,
            "max_best_of": MAX_SEQUENCES,
            "max_stop_sequences": MAX_ENTRIES["stop"],
            "max_input_tokens": max_model_len - 1,
            "max_total_tokens": max_model_len,
            "max_client_batch_size": 1,
            "router": "penstock",
            "version": __version__,
        }
        return JSONResponse(fields)

    streaming = api.endpoint(GenerateRequest, generate_stream)
    summary = "Generate text, streamed (TGI)"
    streamed = api.add("/generate_stream", streaming, summary, None, GenerateRequest, method="POST")
    streamed["responses"]["200"]["content"] = {"text/event-stream": {"schema": STRING}}
    either = api.add(
        "/",
        api.endpoint(CompatGenerateRequest, compat_generate),
        "Generate text, streamed or not (TGI)",
        {"type": "array", "items": reference(Generation, PREFIX)},
        CompatGenerateRequest,
        method="POST",
        streamed=True,
    )
    for described in (streamed, either):
        described["responses"]["422"] = described["responses"]["400"]
    api.add("/info", info, "Model and server information (TGI)")
    endpoint = api.endpoint(GenerateRequest, generate)
    dispatch_by_body(routes, served_models, "/generate", lambda fields: "inputs" in fields, endpoint)


def completion_fields(request: GenerateRequest, streamed: bool) -> dict[str, Any]:
    """Convert a generate request to the fields of OpenAI's completion request.

    Raises ``PenstockError`` for unsupported or contradictory parameters.
    """
    parameters = request.parameters
    if parameters.watermark:
        raise PenstockError(Code.UNSUPPORTED, "watermark: is not supported; leave it out", "watermark")
    if parameters.typical_p not in (None, 1):
        raise PenstockError(Code.UNSUPPORTED, "typical_p: is not supported; use top_p or top_k", "typical_p")
    if streamed:
        for name, given in (
            ("best_of", (parameters.best_of or 1) > 1),
            ("decoder_input_details", parameters.decoder_input_details),
        ):
            if given:
                raise invalid(name, "is not available for streamed responses; leave it out, or use /generate")
    fields = {to: value for name, to in NAMES.items() if (value := getattr(parameters, name)) not in (None, [])}
    fields |= _sampling(parameters)
    fields["max_tokens"] = parameters.max_new_tokens or MAX_NEW_TOKENS
    fields["logprobs"] = parameters.top_n_tokens or 0
    fields["include_stop_str_in_output"] = True
    if parameters.decoder_input_details:
        fields["prompt_logprobs"] = 0
    if parameters.grammar:
        fields |= _constraint(parameters.grammar)
    return fields | {"prompt": request.inputs}


def _sampling(parameters: Parameters) -> dict[str, Any]:
    """Sampling fields, with TGI's defaults instead of the checkpoint's ``generation_config.json``."""
    values = {name: getattr(parameters, name) for name in SAMPLING if getattr(parameters, name) is not None}
    if not parameters.do_sample and "top_k" not in values and all(value == 1 for value in values.values()):
        values["temperature"] = 0.0
    result: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    if parameters.repetition_penalty is not None:
        del result["repetition_penalty"]
    if (parameters.best_of or 1) > 1:
        if values.get("temperature") == 0:
            raise invalid("best_of", f"is {parameters.best_of}, which requires sampling; set do_sample to true")
        result["best_of"] = parameters.best_of
    return result | values


def _constraint(grammar: Grammar) -> dict[str, Any]:
    if grammar.type == "regex":
        if not isinstance(grammar.value, str):
            message = "must be a regular expression (a string), as the grammar type is regex"
            raise invalid("grammar.value", f"{message}, is {str(grammar.value)[:50]!r}")
        return {"guided_regex": grammar.value}
    schema = grammar.value
    if grammar.type == "json_schema":
        if not isinstance(schema, dict) or "schema" not in schema:
            message = "must be an object with the field schema, as the grammar type is json_schema"
            raise invalid("grammar.value", f"{message}, is {str(schema)[:50]!r}")
        schema = schema["schema"]
    return {"guided_json": schema}


def _spread(tokens: list[Token], text: str) -> None:
    """Set the texts of the tokens of a step, so that the texts of all non-special tokens add up to ``text``."""
    regular = [token for token in tokens if not token.special]
    if "".join(token.text for token in regular) == text:
        return
    for token in regular:
        token.text = ""
    if regular:
        regular[-1].text = text
    elif tokens and text:  # text held back in earlier steps is sent with the EOS token
        tokens[-1].text, tokens[-1].special = text, False
