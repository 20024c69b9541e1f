"""FastDeploy's dialect on the shared paths."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.core import Code, Failure
from penstock.core.errors import invalid
from penstock.serve.chat.request import ChatRequest, StreamOptions
from penstock.serve.dialects.dispatch import Dialect
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import record_of
from penstock.serve.models.served_models import ServedModels

from ..openai.completions import CompletionHandler
from ..openai.parse import CHAT_ONLY_FIELDS
from ..openai.requests import CompletionRequest
from ..openai.responses import CHAT_FIELD_NAMES, FIELD_NAMES, ErrorResponse
from ..openai.routes import OpenAIErrorFormat, parse_request
from .handler import FastDeployChat, FastDeployChatHandler, FastDeployCompletions

NAME = "fastdeploy"
"""Name of the profile."""
ERROR_CODES = {
    Code.INVALID: "invalid_value",
    Code.UNSUPPORTED: "invalid_value",
    Code.TOO_LONG: "context_length_exceeded",
    Code.TIMEOUT: "timeout",
    Code.OVERLOADED: "timeout",
    Code.CANCELLED: "client_aborted",
    Code.INTERNAL: "internal_error",
    Code.UNAVAILABLE: "connection_error",
}
METADATA = frozenset(ChatRequest.__struct_fields__).intersection(
    """bad_words bad_words_token_ids chat_template chat_template_kwargs frequency_penalty guided_choice guided_grammar
    guided_json guided_regex max_tokens min_p min_tokens presence_penalty prompt_token_ids reasoning_max_tokens
    repetition_penalty response_max_tokens seed structural_tag temperature top_k top_p""".split()
)
"""Fields that FastDeploy takes from ``metadata``, too, where the request lacks them: those without a default."""


class FastDeployErrorFormat(OpenAIErrorFormat):
    """OpenAI's format with FastDeploy's codes, which are text or null."""

    dialect = NAME

    def response(self, failure: Failure) -> ErrorResponse:
        answer = super().response(failure)
        answer.error.code = ERROR_CODES.get(failure.code)
        if failure.code is Code.NOT_FOUND and failure.field == "model":
            answer.error.code = "model_not_support"
        elif failure.code is Code.INVALID and answer.error.param == "messages":
            answer.error.code = "missing_required_parameter"
        return answer


ERROR_FORMAT = FastDeployErrorFormat(FIELD_NAMES)
CHAT_ERROR_FORMAT = FastDeployErrorFormat(CHAT_FIELD_NAMES)


class FastDeploy(Dialect):
    """The default dialect of the shared paths under FastDeploy's profile."""

    error_format = ERROR_FORMAT

    def __init__(self, served_models: ServedModels) -> None:
        self._served_models = served_models

    def matches(self, raw_request: Request, fields: dict[str, Any]) -> bool:
        return True

    def completion(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        record = record_of(raw_request.scope)
        self._read(fields)
        for name in CHAT_ONLY_FIELDS.intersection(fields):  # which FastDeploy ignores, as any field it does not know
            del fields[name]
            record.unknown.ignore("", name)
        if isinstance(fields.get("logprobs"), bool):
            fields["logprobs"] = int(fields["logprobs"])
        if fields.get("prompt_token_ids"):
            fields.setdefault("prompt", "")  # required by the schema, and not used
        request = parse_request(self._served_models, fields, CompletionRequest, raw_request)
        _include_usage(request.stream_options)
        service = self._served_models.find(request.model)
        openai = CompletionHandler(service, record, request)
        handler = FastDeployCompletions(openai, service, request)
        return Reply.of(service, handler, ERROR_FORMAT, request.stream)

    def chat(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        record = record_of(raw_request.scope)
        record.error_format = CHAT_ERROR_FORMAT
        self._read(fields)
        _take_metadata(fields)
        request = parse_request(self._served_models, fields, ChatRequest, raw_request)
        _include_usage(request.stream_options)
        service = self._served_models.find(request.model)
        handler = FastDeployChat(FastDeployChatHandler(service, record, request, size), service, request)
        return Reply.of(service, handler, CHAT_ERROR_FORMAT, request.stream)

    def _read(self, fields: dict[str, Any]) -> None:
        """Replace values that FastDeploy takes otherwise than OpenAI.

        Without ``--served-model-name`` it does not check ``model``; empty texts in ``stop`` and ``bad_words`` are none.
        """
        models = self._served_models
        if not models.options.served_model_name and not models.has(fields.get("model")):
            fields["model"] = None
        for name in ("stop", "bad_words"):
            if isinstance(given := fields.get(name), list):
                fields[name] = [each for each in given if each != ""]
            elif given == "":
                fields[name] = None


def _include_usage(options: StreamOptions | None) -> None:
    """``include_usage`` is true by default where there are ``stream_options``."""
    if options and options.include_usage is None:
        options.include_usage = True


def _take_metadata(fields: dict[str, Any]) -> None:
    """Fill in fields of the request from ``metadata``, FastDeploy's older place of its own parameters.

    Raises ``PenstockError`` (``invalid``) for ``raw_request``.
    """
    metadata = fields.get("metadata")
    if not isinstance(metadata, dict):
        return
    if "raw_request" in metadata:
        raise invalid("metadata", "raw_request is not supported; send the prompt to /v1/completions")
    for name in METADATA.intersection(metadata):
        if fields.get(name) is None:
            fields[name] = metadata[name]
    if isinstance(thinks := metadata.get("enable_thinking"), bool):
        given = fields.get("chat_template_kwargs")
        if given is None or isinstance(given, dict):
            fields["chat_template_kwargs"] = {"enable_thinking": thinks, **(given or {})}
