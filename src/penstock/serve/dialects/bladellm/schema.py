"""BladeLLM's responses. Full responses and stream chunks have the same format, with the token usage so far."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput
from penstock.serve.dialects.openai.schema import ChatDelta, ChatLogprobs, ChatMessage, CompletionLogprobs, usage_of
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.reply import DONE
from penstock.serve.http.status import STATUS


class ErrorInfo(msgspec.Struct, kw_only=True):
    code: int
    """HTTP status."""
    message: str


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outputs: list[RequestOutput]) -> Usage:
        """Token usage of all sequences so far, including stop tokens."""
        result = usage_of(outputs)
        return cls(
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            total_tokens=result.total_tokens,
        )


class CompletionChoice(msgspec.Struct, kw_only=True):
    finish_reason: str = ""
    """Reason of the end; empty until the sequence has finished."""
    index: int
    logprobs: CompletionLogprobs | None = None
    text: str


class ChatChoice(msgspec.Struct, kw_only=True):
    finish_reason: str = ""
    index: int
    logprobs: ChatLogprobs | None = None
    message: ChatMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    choices: list[CompletionChoice] | list[ChatChoice]
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    usage: Usage
    error_info: None = None


class ErrorResponse(msgspec.Struct, kw_only=True):
    choices: list[None] = []
    error_info: ErrorInfo


class BladeLLMErrorFormat(ErrorFormat):
    dialect = "bladellm"
    stream_end = b"\n\n" + DONE

    def document(self, failure: Failure) -> ErrorResponse:
        return ErrorResponse(error_info=ErrorInfo(code=STATUS[failure.code], message=failure.message))


ERROR_FORMAT = BladeLLMErrorFormat()
