"""BladeLLM's completions and chats, on the paths of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.core import Code, PenstockError
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.chat.request import ChatRequest
from penstock.serve.dialects.dispatch import CHATS, COMPLETIONS, SharedPathDialect
from penstock.serve.dialects.openai.chat import ChatHandler
from penstock.serve.dialects.openai.choices import ChoiceHandler
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.schema import ChatDelta, ChatMessage, CompletionRequest
from penstock.serve.dialects.openai.schema import CompletionChoice as OpenAIChoice
from penstock.serve.http.body import convert
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.lax import convert_types
from penstock.serve.http.reply import DONE, Reply
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.unknown_fields import UnknownFields
from penstock.serve.models.served_models import ServedModel, ServedModels

from .schema import ERROR_FORMAT, ChatChoice, CompletionChoice, CompletionResponse, Usage

R = TypeVar("R", CompletionRequest, ChatRequest)
Kind = Literal["text_completion", "chat.completion", "chat.completion.chunk"]
M = TypeVar("M", ChatMessage, ChatDelta)

DEFAULTS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 1.0}
"""Default sampling parameters, used instead of the checkpoint's ``generation_config.json``."""
SAMPLING_DEFAULTS = ("top_p", "top_k", "min_p", "temperature")
"""Defaults that do not apply to beam search."""
UNSUPPORTED_FIELDS = ("return_token_ids", "prompt_logprobs")
"""Rejected fields: BladeLLM's response format cannot return their results."""


class _BladeHandler(ChoiceHandler):
    """Base class of the completion and chat handlers. Each stream event has the token usage so far."""

    kind: Kind = "text_completion"

    def response(self, choices: Any, usage: Any) -> msgspec.Struct:
        return CompletionResponse(id=self.record.request_id, choices=choices, object=self.kind, usage=usage)

    def usage(self, outputs: list[RequestOutput]) -> Any:
        return Usage.of(outputs)

    def step_usage(self, output: RequestOutput) -> Any:
        return Usage.of([*self.last.values()])

    def format_end(self) -> bytes:
        return DONE


class BladeCompletionHandler(_BladeHandler, CompletionHandler):
    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> msgspec.Struct:
        return _choice(await self.full_choice(i, output, completion))

    async def chunks(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Sequence[msgspec.Struct]:
        choice = await self.delta_choice(i, output, completion)
        return [_choice(chunk) for chunk in choice.chunks()] if choice else ()


class BladeChatHandler(_BladeHandler, ChatHandler):
    kind: Kind = "chat.completion.chunk"

    def __init__(self, service: ServedModel, record: RequestRecord, request: ChatRequest, size: int) -> None:
        super().__init__(service, record, request, size)
        self._begun_choices: set[int] = set()

    async def document(self, choices: Any, outputs: list[RequestOutput]) -> msgspec.Struct:
        self.kind = "chat.completion"
        return self.response(choices, self.usage(outputs))

    async def add_prompt(self, answer: msgspec.Struct, output: RequestOutput) -> None:
        """Do nothing: BladeLLM's responses have no fields for the prompt."""

    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> msgspec.Struct:
        choice = await self.full_choice(output, completion)
        return ChatChoice(
            index=choice.index,
            message=_adapt(choice.message),
            logprobs=choice.logprobs,
            finish_reason=choice.finish_reason or "",
        )

    async def chunks(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Sequence[msgspec.Struct]:
        chunks = self.delta_choices(completion)
        if chunks and completion.index not in self._begun_choices:  # only the first chunk of a choice has the role
            self._begun_choices.add(completion.index)
            chunks[0].delta.role = "assistant"
        for chunk in chunks:
            if chunk.delta == ChatDelta():
                chunk.delta.content = ""
        return [
            ChatChoice(
                index=chunk.index,
                delta=_adapt(chunk.delta),
                logprobs=chunk.logprobs,
                finish_reason=chunk.finish_reason or "",
            )
            for chunk in chunks
        ]


class BladeLLM(SharedPathDialect):
    """BladeLLM's dialect, selected by ``--compat`` or an ``Authorization`` header without a scheme (Alibaba EAS)."""

    error_format = ERROR_FORMAT

    def __init__(self, served_models: ServedModels) -> None:
        self._served_models = served_models
        self._is_default = served_models.options.compat == "bladellm"
        self.header = None if self._is_default else "authorization"

    def matches(self, raw_request: Request, fields: dict[str, Any]) -> bool:
        return self.error_format_of(raw_request.scope) is not None

    def error_format_of(self, scope: Scope) -> ErrorFormat | None:
        """The error format of a request, selected by its headers; None if it is not a BladeLLM request."""
        if scope["path"] not in (*COMPLETIONS, *CHATS):
            return None
        token = Headers(scope=scope).get("authorization", "").strip()
        bare = bool(token) and " " not in token and token.lower() not in ("bearer", "basic")
        return ERROR_FORMAT if bare or self._is_default else None

    def completion(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        service, record = self._served_models.find_or_first(model_name(fields)), record_of(raw_request.scope)
        request = read(fields, CompletionRequest, service, record.unknown)
        handler = BladeCompletionHandler(service, record, request)
        return Reply.of(service, handler, ERROR_FORMAT, request.stream)

    def chat(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        service, record = self._served_models.find_or_first(model_name(fields)), record_of(raw_request.scope)
        request = read(fields, ChatRequest, service, record.unknown)
        handler = BladeChatHandler(service, record, request, size)
        return Reply.of(service, handler, ERROR_FORMAT, request.stream)


def read(fields: dict[str, Any], schema: type[R], service: ServedModel, unknown: UnknownFields) -> R:
    """Parse a request. ``model`` selects a LoRA adapter; a name that is not an adapter is ignored.

    Raises ``PenstockError`` as ``convert`` does.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    convert_types(given, schema, "pydantic")
    if isinstance(model := given.get("model"), str) and model not in service.gateway.engine_pool.adapters:
        del given["model"]
    for name in UNSUPPORTED_FIELDS:
        if given.get(name) not in (None, False):
            message = f"{name}: BladeLLM's response format has no field for it; leave {name} out"
            raise PenstockError(Code.UNSUPPORTED, message, name)
    beam_search = given.get("use_beam_search") is True
    defaults = {name: value for name, value in DEFAULTS.items() if not (beam_search and name in SAMPLING_DEFAULTS)}
    if "max_completion_tokens" not in given:
        defaults["max_tokens"] = service.gateway.input_processor.default_max_tokens
    return convert(defaults | given, schema, unknown)


def model_name(fields: dict[str, Any]) -> str | None:
    """The ``model`` of a request; None if it is absent or not a string."""
    name = fields.get("model")
    return name if isinstance(name, str) else None


def _choice(choice: OpenAIChoice) -> CompletionChoice:
    reason = choice.finish_reason or ""
    return CompletionChoice(index=choice.index, text=choice.text, logprobs=choice.logprobs, finish_reason=reason)


def _adapt(choice: M) -> M:
    """Remove ``reasoning``: BladeLLM's messages only have ``reasoning_content``."""
    choice.reasoning = UNSET
    choice.reasoning_content = choice.reasoning_content or UNSET
    return choice
