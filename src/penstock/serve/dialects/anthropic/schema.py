"""Requests, responses and stream events of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.chat.request import TOOL_NAME, NonEmptyText, Number
from penstock.serve.http.body import Reading, RequestBody, Unsupported
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.reply import named_event

ERROR_TYPES = {
    Code.UNAUTHORIZED: "authentication_error",
    Code.NOT_FOUND: "not_found_error",
    Code.TOO_LARGE: "request_too_large",
    Code.OVERLOADED: "rate_limit_error",
    Code.TIMEOUT: "timeout_error",
    Code.UNAVAILABLE: "overloaded_error",
    Code.INTERNAL: "api_error",
}
UNSUPPORTED_THREAD: dict[str, Any] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Error details that make Anthropic's tool runner send the whole conversation with each request."""
CALL_ID_PREFIX = "toolu_"
"""Prefix of the ids of ``tool_use`` blocks, which some clients check."""
UNSUPPORTED = {
    "container": Unsupported("the server does not execute code; leave it out"),
    "thread": Unsupported("the server keeps no state between requests: send the whole conversation"),
    "mcp_servers": Unsupported("the server does not call tools; send their definitions and call them yourself", ([],)),
}


class ImageSource(msgspec.Struct, kw_only=True):
    """Source of an image block: base64 data or a URL."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct, kw_only=True):
    """A content block."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    """Id of the ``tool_use`` block that a tool result belongs to."""
    source: ImageSource | None = None
    content: str | list[Block] | None = None

    signature: str | None = None
    is_error: bool | None = None
    citations: list[Any] | dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """Ignored, like ``signature``, ``is_error`` and ``citations``."""


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], msgspec.Meta(min_length=1)]


class Tool(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=TOOL_NAME)] | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    """Ignored, like ``cache_control``: tool calls are always streamed."""


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class Format(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Format | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Reasoning effort, passed to chat templates that read it."""


class ContextEdit(msgspec.Struct, kw_only=True):
    type: Literal["clear_thinking_20251015"]
    """Ignored: the chat template decides which earlier reasoning is kept."""


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    edits: list[ContextEdit] | None = None


class CountTokensRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to count tokens: the fields that determine the prompt."""

    reading: ClassVar = Reading(unsupported=UNSUPPORTED)

    model: str | None = None
    """Name of a served model or adapter; absent or "default": the first model."""
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Ignored: prefixes are always cached."""
    container: None = None
    mcp_servers: list[Any] | None = None
    context_management: ContextManagement | None = None
    thread: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: list[NonEmptyText] | None = None
    temperature: Annotated[Number, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class Error(msgspec.Struct, kw_only=True):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class ErrorResponse(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: Error


class OutputDetails(msgspec.Struct, kw_only=True):
    thinking_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Prompt tokens that were not found in the prefix cache."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails


class MessageResponse(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: (
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    ) = None
    stop_sequence: str | None = None
    usage: Usage


class ModelInfo(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    """Start time of the server (RFC 3339)."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event with its type in both the event line and the data."""
    return named_event(kind, {"type": kind, **fields})


def error_of(failure: Failure) -> ErrorResponse:
    """Convert a failure to Anthropic's error response."""
    message = failure.message
    if failure.code is Code.TOO_LONG:  # clients recognize the error by this message
        message = f"prompt is too long: {failure.value:.0f} tokens > {failure.limit:.0f} maximum"
    details = UNSUPPORTED_THREAD if failure.field == "thread" and failure.code is Code.UNSUPPORTED else UNSET
    return ErrorResponse(
        error=Error(type=ERROR_TYPES.get(failure.code, "invalid_request_error"), message=message, details=details)
    )


def usage_of(output: RequestOutput) -> Usage:
    cached = output.num_cached_tokens
    output_tokens = sum(len(completion.token_ids) for completion in output.outputs) + output.num_discarded_tokens
    thinking_tokens = sum(completion.reasoning_tokens for completion in output.outputs)
    return Usage(
        input_tokens=len(output.prompt_token_ids) - cached,
        cache_read_input_tokens=cached,
        output_tokens=output_tokens,
        output_tokens_details=OutputDetails(thinking_tokens=thinking_tokens),
    )


def stop_reason_of(completion: CompletionOutput, called: bool, max_tokens: int) -> dict[str, Any]:
    """The fields ``stop_reason`` and ``stop_sequence`` of a message."""
    if completion.finish_reason == "length":
        reason = "max_tokens" if len(completion.token_ids) >= max_tokens else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


class AnthropicErrorFormat(ErrorFormat):
    dialect = "anthropic"

    def document(self, failure: Failure) -> ErrorResponse:
        return error_of(failure)

    def stream_error(self, failure: Failure) -> bytes:
        return event("error", error=error_of(rename_field(failure, self._names)).error)


ERROR_FORMAT = AnthropicErrorFormat()
"""Error format of requests that are not parsed yet."""
PARSED_ERROR_FORMAT = AnthropicErrorFormat(
    {"prompt": "messages", "stop": "stop_sequences", "response_format": "output_config.format"}
)
"""Error format of parsed requests: field names of chat requests are replaced by field names of Messages requests."""
