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
from penstock.serve.dialects.dispatch import answer_by_body
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
"""Of the schemas' names in the OpenAPI document."""
MAX_NEW_TOKENS = 100
"""Its default."""
NAMES = {
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "truncate": "truncate_prompt_tokens",
    "adapter_id": "model",
}
SAMPLING = ("temperature", "top_k", "top_p")


class TGIHandler(CompletionHandler):
    """One request.

    Args:
        as_list: whether the answer is a list of one, as that of ``/`` is.
    """

    def __init__(
        self,
        service: ServedModel,
        record: RequestRecord,
        request: CompletionRequest,
        given: GenerateRequest,
        as_list: bool,
    ) -> None:
        super().__init__(service, record, request)
        self.parameters = given.parameters
        self._inputs = given.inputs
        self._as_list = as_list
        self._num_tokens = 0
        """Tokens that were sent."""

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        answer = Generation(generated_text=self._text(outputs[0].outputs[0]))
        if self.parameters.details or self.parameters.decoder_input_details:
            answer.details = self._details(outputs[0])
        return encode([answer] if self._as_list else answer)

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        """An event for each token; the text of a step's tokens that is not yet certain comes with a later one."""
        completion = output.outputs[0]
        if (piece := self.cursors[0].advance(completion)) is None:
            return b""
        tokens = [self._sampled(position) for position in piece.positions]
        _spread(tokens, piece.text)
        events = []
        for token, position in zip(tokens, piece.positions, strict=True):
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
        wanted = bool(self.parameters.top_n_tokens)
        return Details(
            finish_reason=reason_of(completion),
            generated_tokens=len(completion.token_ids),
            seed=self.parameters.seed,
            prefill=self._prefill(output) if self.parameters.decoder_input_details else [],
            tokens=[self._sampled(position) for position in positions],
            top_tokens=[self._top(position) for position in positions] if wanted and positions else UNSET,
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
        """The likeliest tokens at a position."""
        return [self._token(*entry) for entry in likeliest(position, self.parameters.top_n_tokens or 0)]

    def _token(self, token_id: int, given: Logprob) -> Token:
        logprob, is_special = max(given.logprob, MIN_LOGPROB), token_id in self.tokenizer.special_ids
        return Token(id=token_id, text=given.decoded_token, logprob=logprob, special=is_special)


class TGIRoutes(DialectRoutes):
    """Takes parameters that are null as absent, too."""

    def convert(self, fields: dict[str, Any], schema: type[T], raw_request: Request) -> T:
        if isinstance(given := fields.get("parameters"), dict):
            fields["parameters"] = {name: value for name, value in given.items() if value is not None}
        return super().convert(fields, schema, raw_request)


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add them; vLLM's ``/generate`` is there already."""
    routes.error_formats.add(ERROR_FORMAT, "/generate_stream", "/info")
    routes.error_formats.add_exact(ERROR_FORMAT, "/")
    added = TGIRoutes(routes, served_models, ERROR_FORMAT, SCHEMAS, PREFIX)

    def answer(request: GenerateRequest, record: RequestRecord, streamed: bool, as_list: bool = False) -> Response:
        service = served_models.find(request.parameters.adapter_id)
        completion = convert(completion_fields(request, streamed), CompletionRequest, record.unknown, "")
        handler = TGIHandler(service, record, completion, request, as_list)
        return Reply.of(service, handler, ERROR_FORMAT, streamed)

    def generate(request: GenerateRequest, record: RequestRecord, size: int) -> Response:
        return answer(request, record, streamed=False)

    def generate_stream(request: GenerateRequest, record: RequestRecord, size: int) -> Response:
        return answer(request, record, streamed=True)

    def compat_generate(request: CompatGenerateRequest, record: RequestRecord, size: int) -> Response:
        return answer(request, record, request.stream, as_list=True)

    async def info(_: Request) -> Response:
        service = served_models.find()
        longest = service.gateway.engine_pool.require_engine().max_model_len
        facts: dict[str, Any] = {
            "model_id": service.configuration.engine.model or service.name,
            "model_sha": None,
            "model_dtype": str(service.configuration.engine.dtype),
            "model_device_type": str(service.configuration.engine.device),
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

    streaming = added.answering(GenerateRequest, generate_stream)
    stream_summary = "Text Generation Inference's streamed generation"
    streamed = added.add("/generate_stream", streaming, stream_summary, None, GenerateRequest, method="POST")
    streamed["responses"]["200"]["content"] = {"text/event-stream": {"schema": STRING}}
    either = added.add(
        "/",
        added.answering(CompatGenerateRequest, compat_generate),
        "Text Generation Inference's generation, streamed or not",
        {"type": "array", "items": reference(Generation, PREFIX)},
        CompatGenerateRequest,
        method="POST",
        streamed=True,
    )
    for described in (streamed, either):
        described["responses"]["422"] = described["responses"]["400"]
    added.add("/info", info, "Text Generation Inference's description of the model")
    whole = added.answering(GenerateRequest, generate)
    answer_by_body(routes, served_models, "/generate", lambda fields: "inputs" in fields, whole)


def completion_fields(request: GenerateRequest, streamed: bool) -> dict[str, Any]:
    """A request as OpenAI's completion. Raises ``PenstockError`` for what is not supported, and contradictions."""
    given = request.parameters
    if given.watermark:
        raise PenstockError(Code.UNSUPPORTED, "watermark: is not supported", "watermark")
    if given.typical_p not in (None, 1):
        raise PenstockError(Code.UNSUPPORTED, "typical_p: is not supported; use top_p or top_k", "typical_p")
    if streamed:
        whole_only = {"best_of": (given.best_of or 1) > 1, "decoder_input_details": given.decoder_input_details}
        for name, asked in whole_only.items():
            if asked:
                raise invalid(name, "is for answers that are not streamed")
    fields = {to: value for name, to in NAMES.items() if (value := getattr(given, name)) not in (None, [])}
    fields |= _sampling(given)
    fields["max_tokens"] = given.max_new_tokens or MAX_NEW_TOKENS
    fields["logprobs"] = given.top_n_tokens or 0
    fields["include_stop_str_in_output"] = True
    if given.decoder_input_details:
        fields["prompt_logprobs"] = 0
    if given.grammar:
        fields |= _constraint(given.grammar)
    return fields | {"prompt": request.inputs}


def _sampling(given: Parameters) -> dict[str, Any]:
    """Defaults are the dialect's own, not the model's."""
    values = {name: getattr(given, name) for name in SAMPLING if getattr(given, name) is not None}
    if not given.do_sample and "top_k" not in values and all(value == 1 for value in values.values()):
        values["temperature"] = 0.0
    result: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    if given.repetition_penalty is not None:
        del result["repetition_penalty"]
    if (given.best_of or 1) > 1:
        if values.get("temperature") == 0:
            raise invalid("best_of", "requires sampling (do_sample)")
        result["best_of"] = given.best_of
    return result | values


def _constraint(grammar: Grammar) -> dict[str, Any]:
    if grammar.type == "regex":
        if not isinstance(grammar.value, str):
            raise invalid("grammar.value", "is no regular expression")
        return {"guided_regex": grammar.value}
    schema = grammar.value
    if grammar.type == "json_schema":
        if not isinstance(schema, dict) or "schema" not in schema:
            raise invalid("grammar.value", "needs an object with schema")
        schema = schema["schema"]
    return {"guided_json": schema}


def _spread(tokens: list[Token], text: str) -> None:
    """Give the tokens of a step its text, so that all texts but those of special tokens are the answer."""
    spoken = [token for token in tokens if not token.special]
    if "".join(token.text for token in spoken) == text:
        return
    for token in spoken:
        token.text = ""
    if spoken:
        spoken[-1].text = text
    elif tokens and text:  # what was held back comes with the end
        tokens[-1].text, tokens[-1].special = text, False
