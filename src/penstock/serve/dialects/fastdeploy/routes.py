"""FastDeploy's chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from penstock.core import Code, Failure
from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.chat.request import ChatRequest
from penstock.serve.http.request_record import record_of

from ..openai.chat import ChatHandler
from ..openai.choices import ChoiceHandler
from ..openai.completions import CompletionHandler
from ..openai.routes import OpenAI
from ..openai.schema import (
    CHAT_FIELD_NAMES,
    CHAT_ONLY_FIELDS,
    FIELD_NAMES,
    ErrorResponse,
    OpenAIErrorFormat,
    prompt_logprobs_of,
)
from .schema import (
    ChatChoice,
    ChatDelta,
    ChatMessage,
    ChunkChoice,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    FirstChoice,
    FirstCompletionChoice,
    FirstDelta,
    PromptLogprobs,
    TopLogprob,
    Usage,
)

NAME = "fastdeploy"
"""Name of the compatibility profile (``--compat``)."""
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
"""Fields that are read from ``metadata`` if the request lacks them: the fields without a default in FastDeploy."""


class FastDeployErrorFormat(OpenAIErrorFormat):
    """OpenAI's error format with FastDeploy's error codes, which are strings or null."""

    dialect = NAME

    def document(self, failure: Failure) -> ErrorResponse:
        answer = super().document(failure)
        answer.error.code = ERROR_CODES.get(failure.code)
        if failure.code is Code.NOT_FOUND and failure.field == "model":
            answer.error.code = "model_not_support"
        elif failure.code is Code.INVALID and answer.error.param == "messages":
            answer.error.code = "missing_required_parameter"
        return answer


class _Handler(ChoiceHandler):
    """Base class of the completion and chat handlers."""

    def usage(self, outputs: list[RequestOutput]) -> Any:
        return Usage.of(outputs)

    def step_usage(self, output: RequestOutput) -> Any:
        options = self.request.stream_options
        return self.usage([output]) if options and options.continuous_usage_stats else UNSET

    async def _prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs:
        if output.prompt_logprobs is None:
            return None
        found: PromptLogprobs = await prompt_logprobs_of(output, self.service.gateway.fair_queue)
        return found


class FastDeployChatHandler(_Handler, ChatHandler):
    top_logprob = TopLogprob

    async def add_prompt(self, answer: msgspec.Struct, output: RequestOutput) -> None:
        """Do nothing: the prompt is in each choice."""

    async def document(self, choices: Any, outputs: list[RequestOutput]) -> Any:
        """Set image and video tokens to 0, or to null if the model takes images: images are not counted separately."""
        answer: Any = await super().document(choices, outputs)
        details = answer.usage.prompt_tokens_details
        details.image_tokens = details.video_tokens = None if self.service.sees_images else 0
        return answer

    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> msgspec.Struct:
        choice = await self.full_choice(output, completion)
        parsed = choice.message
        message = ChatMessage(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content or None,
            tool_calls=parsed.tool_calls or None,
        )
        if self.request.return_token_ids:
            message.prompt_token_ids, message.prompt_tokens = output.prompt_token_ids, self.prompt_text(output)
            message.completion_token_ids, message.completion_tokens = completion.token_ids, completion.text
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=choice.logprobs,
            prompt_logprobs=await self._prompt_logprobs(output),
            finish_reason=choice.finish_reason,
        )

    async def chunks(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Sequence[msgspec.Struct]:
        first = [] if completion.index in self.cursors else [await self._first(output, completion)]
        cursor = self.cursors[completion.index]
        start, chunks = cursor.text, []
        for choice in self.delta_choices(completion):
            delta = ChatDelta(
                content=choice.delta.content or "",
                reasoning_content=choice.delta.reasoning_content or None,
                tool_calls=choice.delta.tool_calls or None,
            )
            if self.request.return_token_ids:
                delta.completion_token_ids = choice.token_ids or []
                delta.completion_tokens = completion.text[start : cursor.text]
                start = cursor.text
            chunk = ChunkChoice(
                index=choice.index,
                delta=delta,
                logprobs=choice.logprobs,
                arrival_time=_arrival(output),
                finish_reason=choice.finish_reason or UNSET,
            )
            chunks.append(chunk)
        return [*first, *chunks]

    async def _first(self, output: RequestOutput, completion: CompletionOutput) -> FirstChoice:
        delta = FirstDelta(content=self.prompt.echoed)
        if self.request.return_token_ids:
            delta.prompt_token_ids, delta.prompt_tokens = output.prompt_token_ids, self.prompt_text(output)
        return FirstChoice(index=completion.index, delta=delta, prompt_logprobs=await self._prompt_logprobs(output))


class FastDeployCompletionHandler(_Handler, CompletionHandler):
    def usage(self, outputs: list[RequestOutput]) -> Any:
        return Usage.of(outputs, self.num_hidden_tokens)

    def response(self, choices: Any, usage: Any) -> msgspec.Struct:
        return CompletionChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    async def document(self, choices: Any, outputs: list[RequestOutput]) -> msgspec.Struct:
        usage = self.usage(outputs)
        usage.prompt_tokens_details.image_tokens = usage.prompt_tokens_details.video_tokens = None
        return super().response(choices, usage)

    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> msgspec.Struct:
        choice = await self.full_choice(i, output, completion)
        answer = CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=choice.logprobs,
            prompt_logprobs=None if choice.prompt_logprobs is UNSET else choice.prompt_logprobs,
            finish_reason=choice.finish_reason,
        )
        if self.request.return_token_ids:
            answer.prompt_token_ids, answer.prompt_tokens = output.prompt_token_ids, self.prompt_text(output)
            answer.completion_token_ids = choice.completion_token_ids or []
            answer.completion_tokens = completion.text if answer.completion_token_ids else ""
        return answer

    async def chunks(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Sequence[msgspec.Struct]:
        cursor, with_ids = self.cursors[self.number(i, completion)], self.request.return_token_ids
        start, is_first = cursor.text, not cursor.tokens
        choice = await self.delta_choice(i, output, completion)
        if choice is None:
            return ()
        prompt_logprobs = None if choice.prompt_logprobs is UNSET else choice.prompt_logprobs
        first = []
        if is_first and with_ids:
            first.append(
                FirstCompletionChoice(
                    index=choice.index,
                    prompt_token_ids=output.prompt_token_ids,
                    prompt_logprobs=prompt_logprobs,
                    prompt_tokens=self.prompt_text(output),
                )
            )
            prompt_logprobs = None
        chunk = CompletionChunkChoice(
            index=choice.index,
            text=choice.text,
            arrival_time=_arrival(output),
            logprobs=choice.logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=choice.finish_reason or UNSET,
        )
        if with_ids:
            chunk.completion_token_ids = choice.completion_token_ids or []
            chunk.completion_tokens = completion.text[start : cursor.text] if chunk.completion_token_ids else ""
        return [*first, chunk]


class FastDeploy(OpenAI):
    """The default dialect of the shared paths with ``--compat fastdeploy``."""

    error_format = FastDeployErrorFormat(FIELD_NAMES)
    chat_error_format = FastDeployErrorFormat(CHAT_FIELD_NAMES)
    completion_handler = FastDeployCompletionHandler
    chat_handler = FastDeployChatHandler

    def completion(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        self._read(fields)
        for name in CHAT_ONLY_FIELDS.intersection(fields):  # FastDeploy ignores unknown fields
            del fields[name]
            record_of(raw_request.scope).unknown.ignore("", name)
        if isinstance(fields.get("logprobs"), bool):
            fields["logprobs"] = int(fields["logprobs"])
        return super().completion(raw_request, fields, size)

    def chat(self, raw_request: Request, fields: dict[str, Any], size: int) -> Response:
        record_of(raw_request.scope).error_format = self.chat_error_format
        self._read(fields)
        _take_metadata(fields)
        return super().chat(raw_request, fields, size)

    def _read(self, fields: dict[str, Any]) -> None:
        """Replace values that FastDeploy interprets differently from OpenAI.

        ``model`` is not checked without ``--served-model-name``; empty strings in ``stop`` and ``bad_words`` are
        dropped; ``include_usage`` defaults to true if ``stream_options`` is given.
        """
        models, options = self._served_models, fields.get("stream_options")
        if not models.options.served_model_name and not models.has(fields.get("model")):
            fields["model"] = None
        for name in ("stop", "bad_words"):
            if isinstance(given := fields.get(name), list):
                fields[name] = [each for each in given if each != ""]
            elif given == "":
                fields[name] = None
        if isinstance(options, dict) and options.get("include_usage") is None:
            options["include_usage"] = True


def _take_metadata(fields: dict[str, Any]) -> None:
    """Fill in missing fields from ``metadata``, where older FastDeploy clients send sampling parameters.

    Raises ``PenstockError`` (``invalid``) if ``metadata`` has a ``raw_request``.
    """
    metadata = fields.get("metadata")
    if not isinstance(metadata, dict):
        return
    if "raw_request" in metadata:
        raise invalid("metadata", "raw_request is not supported; send the prompt to /v1/completions")
    for name in METADATA.intersection(metadata):
        if fields.get(name) is None:
            fields[name] = metadata[name]
    if isinstance(thinking := metadata.get("enable_thinking"), bool):
        kwargs = fields.get("chat_template_kwargs")
        if kwargs is None or isinstance(kwargs, dict):
            fields["chat_template_kwargs"] = {"enable_thinking": thinking, **(kwargs or {})}


def _arrival(output: RequestOutput) -> float | None:
    """Seconds from a request's first step to its latest token; None before the first token."""
    times = output.times
    return None if times.last_token is None else times.last_token - times.arrived - times.queued
