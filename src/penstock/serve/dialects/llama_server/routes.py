"""Routes of llama-server's API."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core import Code, PenstockError
from penstock.frontend.outputs import Logprob, PositionLogprobs, RequestOutput, embedding_of
from penstock.serve.chat.messages import messages_of, template_options
from penstock.serve.dialects.dispatch import dispatch_by_body
from penstock.serve.dialects.endpoints import DialectRoutes
from penstock.serve.dialects.openai import schema as openai
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.embeddings import EmbeddingHandler
from penstock.serve.dialects.openai.embeddings import EmbeddingRequest as OpenAIEmbeddingRequest
from penstock.serve.generation import likeliest
from penstock.serve.http.body import convert
from penstock.serve.http.openapi import OBJECT, reference
from penstock.serve.http.reply import Reply, encode, event
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModel, ServedModels
from penstock.text.infill import infill_format

from .convert import generation_fields, prompts_of
from .schema import (
    ERROR_FORMAT,
    ERROR_PATHS,
    Answer,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    InfillRequest,
    TemplateRequest,
    TokenizeRequest,
    TokenProbability,
    TopProbability,
    stop_of,
    timings_of,
)
from .state import props, settings_of, slots

SCHEMAS = (CompletionRequest, InfillRequest, EmbeddingRequest, TemplateRequest, TokenizeRequest, Answer)
PREFIX = "llama_server."
"""Prefix of schema names in the OpenAPI document."""


class LlamaServerHandler(CompletionHandler):
    """Handler of one completion or infill request.

    Args:
        request: the request, converted to OpenAI's completion request.
        llama_request: the original request.
        as_list: respond with a list (if the request has a list of prompts).
    """

    def __init__(
        self,
        service: ServedModel,
        record: RequestRecord,
        request: openai.CompletionRequest,
        llama_request: GenerationRequest,
        as_list: bool,
    ) -> None:
        super().__init__(service, record, request)
        self._llama_request = llama_request
        self._as_list = as_list
        self._is_empty = llama_request.n_predict == 0
        """True if no output is returned (``n_predict`` 0). The engine still generates one token."""

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        answers = [self._full(i, output) for i, output in enumerate(outputs)]
        return encode(answers if self._as_list else answers[0])

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        completion, events = output.outputs[0], b""
        delta = self.cursors[index].advance(completion)
        if delta is not None and (delta.text or delta.positions) and not self._is_empty:
            chunk = self._answer(index, output, delta.text, delta.token_ids, stop=False)
            chunk.completion_probabilities = self._probabilities(delta.positions)
            if self._llama_request.timings_per_token:
                chunk.timings = timings_of(output)
            events += event(chunk)
        if completion.finished:
            events += event(self._finish_answer(self._answer(index, output, "", [], stop=True), output))
        return events

    def format_end(self) -> bytes:
        return b""

    def _full(self, i: int, output: RequestOutput) -> Answer:
        completion = output.outputs[0]
        if self._is_empty:
            return self._finish_answer(self._answer(i, output, "", [], stop=True), output)
        token_ids = completion.token_ids if self._llama_request.return_tokens else []
        answer = self._answer(i, output, completion.text, token_ids, stop=True)
        answer.completion_probabilities = self._probabilities(completion.logprobs or [])
        return self._finish_answer(answer, output)

    def _answer(self, i: int, output: RequestOutput, text: str, token_ids: list[int], stop: bool) -> Answer:
        return Answer(
            index=i,
            content=text,
            tokens=token_ids,
            stop=stop,
            tokens_predicted=0 if self._is_empty else len(output.outputs[0].token_ids),
            tokens_evaluated=len(output.prompt_token_ids),
        )

    def _finish_answer(self, answer: Answer, output: RequestOutput) -> Answer:
        """Set the additional fields of a full response or last chunk: settings, stop reason, timings."""
        completion = output.outputs[0]
        answer.model, answer.prompt = self.service.name, self.prompt_text(output)
        answer.generation_settings = self._settings()
        answer.stop_type, answer.stopping_word = ("limit", "") if self._is_empty else stop_of(completion)
        answer.has_new_line, answer.truncated = "\n" in completion.text, False
        answer.tokens_cached = len(output.prompt_token_ids) + answer.tokens_predicted
        answer.timings = timings_of(output)
        return answer

    def _settings(self) -> dict[str, Any]:
        return settings_of(self.sampling) | {
            "n_predict": self._llama_request.n_predict if self._llama_request.n_predict is not None else -1,
            "stream": bool(self._llama_request.stream),
            "grammar": self._llama_request.grammar or "",
            "timings_per_token": bool(self._llama_request.timings_per_token),
        }

    def _probabilities(self, positions: list[PositionLogprobs]) -> Any:
        if not self._llama_request.n_probs or not positions:
            return UNSET
        return [self._position(position) for position in positions]

    def _position(self, position: PositionLogprobs) -> TokenProbability:
        chosen = self._token(*next(iter(position.items())))
        top = [self._token(*entry) for entry in likeliest(position, self._llama_request.n_probs or 0)]
        return TokenProbability(
            id=chosen.id, token=chosen.token, bytes=chosen.bytes, logprob=chosen.logprob, top_logprobs=top
        )

    def _token(self, token_id: int, entry: Logprob) -> TopProbability:
        vocabulary, logprob = self.tokenizer.vocabulary, max(entry.logprob, openai.MIN_LOGPROB)
        token_bytes = [*vocabulary[token_id]] if token_id < len(vocabulary) else []
        return TopProbability(id=token_id, token=entry.decoded_token, bytes=token_bytes, logprob=logprob)


class LlamaServerEmbeddingHandler(EmbeddingHandler):
    """Handler of an embedding request. The result of each text is a list with one embedding (of the whole text)."""

    field = "content"

    def response(self, outputs: list[RequestOutput]) -> object:
        return [{"index": i, "embedding": [embedding_of(output)]} for i, output in enumerate(outputs)]


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add llama-server's routes. vLLM's ``/tokenize`` must have been added before, as both share the path."""
    routes.error_formats.add(ERROR_FORMAT, *ERROR_PATHS)
    api = DialectRoutes(routes, served_models, ERROR_FORMAT, SCHEMAS, PREFIX)

    async def reply(
        raw_request: Request,
        request: GenerationRequest,
        prompts: list[str] | list[list[int]],
        as_list: bool,
        stop_token_ids: tuple[int, ...] = (),
    ) -> Response:
        service, record = served_models.find(request.model), record_of(raw_request.scope)
        fields = await generation_fields(request, service.gateway) | {"prompt": prompts}
        if stop_token_ids:
            fields["stop_token_ids"] = [*stop_token_ids]
        fields = {name: value for name, value in fields.items() if value is not None}
        completion = convert(fields, openai.CompletionRequest, record.unknown, "numbers")
        handler = LlamaServerHandler(service, record, completion, request, as_list)
        return Reply.of(service, handler, ERROR_FORMAT, request.stream)

    async def completion(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, CompletionRequest)
        prompts = await prompts_of(request.prompt, served_models.find(request.model).gateway)
        several = isinstance(request.prompt, list) and not any(isinstance(part, int) for part in request.prompt)
        return await reply(raw_request, request, prompts, several)

    async def infill(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, InfillRequest)
        gateway = served_models.find(request.model).gateway
        ends = infill_format(gateway.input_processor.tokenizer).ends
        files = [(file.filename, file.text) for file in request.input_extra]
        token_ids = await gateway.encode_infill(request.input_prefix, request.input_suffix, files=files)
        token_ids += await gateway.encode(request.prompt, False)
        return await reply(raw_request, request, [token_ids], False, ends)

    async def embedding(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, EmbeddingRequest)
        service = served_models.find(request.model)
        prompts: Any = await prompts_of(request.content, service.gateway, "content")
        converted = OpenAIEmbeddingRequest(input=prompts, model=request.model)
        handler = LlamaServerEmbeddingHandler(service, record_of(raw_request.scope), converted)
        return Reply.of(service, handler, ERROR_FORMAT, False)

    async def apply_template(raw_request: Request) -> Response:
        request, size = await api.read(raw_request, TemplateRequest, media=True)
        service = served_models.find(request.model)
        gateway = service.gateway
        options = template_options(
            request, request.tools, gateway.input_processor.chats.response_formats().tools is not None
        )
        messages, client = messages_of(request.messages, service.sees_images), record_of(raw_request.scope).sender
        conversation = await gateway.chat_prompt(messages, size, options, client=client)
        return JSONResponse({"prompt": conversation.text})

    async def tokenize(raw_request: Request) -> Response:
        request, _ = await api.read(raw_request, TokenizeRequest)
        gateway = served_models.find(request.model).gateway
        tokens: list[Any] = [*await gateway.encode(request.content, bool(request.add_special))]
        if request.with_pieces:
            vocabulary = gateway.input_processor.tokenizer.vocabulary
            tokens = [{"id": token_id, "piece": _text_or_bytes(vocabulary[token_id])} for token_id in tokens]
        return JSONResponse({"tokens": tokens})

    async def get_props(raw_request: Request) -> Response:
        return JSONResponse(props(served_models.find(raw_request.query_params.get("model"))))

    async def change_props(_: Request) -> Response:
        message = "/props: options cannot be changed at run time; set them when the server starts (penstock serve)"
        raise PenstockError(Code.UNSUPPORTED, message)

    async def get_slots(raw_request: Request) -> Response:
        return JSONResponse(slots(served_models.find(raw_request.query_params.get("model"))))

    answer = reference(Answer, PREFIX)
    answer_or_list = {"anyOf": [answer, {"type": "array", "items": answer}]}
    objects = {"type": "array", "items": OBJECT}
    for path in ("/completion", "/completions"):
        api.post(path, completion, "Complete prompts (llama-server)", CompletionRequest, answer=answer_or_list)
    summary = "Infill code between a prefix and a suffix (llama-server)"
    api.post("/infill", infill, summary, InfillRequest, answer=Answer)
    api.post("/embedding", embedding, "Embed texts (llama-server)", EmbeddingRequest, answer=objects)
    api.post("/apply-template", apply_template, "Render a chat as a prompt (llama-server)", TemplateRequest)
    api.add("/props", get_props, "Properties of a model (llama-server)", query=("model",))
    api.add("/slots", get_slots, "Slots (llama-server)", objects, query=("model",))
    api.post("/props", change_props, "Change properties (llama-server); not supported")
    dispatch_by_body(routes, served_models, "/tokenize", lambda fields: "content" in fields, tokenize)


def _text_or_bytes(token: bytes) -> str | list[int]:
    """The text of a token, or its bytes if they are not valid UTF-8."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return [*token]
