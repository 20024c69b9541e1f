"""Responses of Anthropic's API: a message, or the events of a streamed one."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.chat.stream_cursor import CallDelta, Delta
from penstock.text import Message, MessagePart, ToolCall

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
"""Error details by which Anthropic's tool runner learns to send the whole conversation with each request."""
CALL_ID_PREFIX = "toolu_"
"""Prefix of the ids of ``tool_use`` blocks, which some clients check."""
Block = dict[str, Any]


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
    content: list[Block]
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
    """When the server started (RFC 3339)."""
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


encode = msgspec.json.Encoder().encode


def event(kind: str, **fields: Any) -> bytes:
    """One server-sent event, with its type in the event line and in the data."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def error_of(failure: Failure) -> ErrorResponse:
    """A failure in Anthropic's format."""
    message = failure.message
    if failure.code is Code.TOO_LONG:  # clients look for this message
        message = f"prompt is too long: {failure.value:.0f} tokens > {failure.limit:.0f} maximum"
    details = UNSUPPORTED_THREAD if failure.field == "thread" and failure.code is Code.UNSUPPORTED else UNSET
    return ErrorResponse(
        error=Error(type=ERROR_TYPES.get(failure.code, "invalid_request_error"), message=message, details=details)
    )


def usage_of(output: RequestOutput) -> Usage:
    cached = output.num_cached_tokens
    output_tokens = sum(len(completion.token_ids) for completion in output.outputs) + output.num_discarded_tokens
    thought = sum(completion.reasoning_tokens for completion in output.outputs)
    return Usage(
        input_tokens=len(output.prompt_token_ids) - cached,
        cache_read_input_tokens=cached,
        output_tokens=output_tokens,
        output_tokens_details=OutputDetails(thinking_tokens=thought),
    )


def stop_reason_of(completion: CompletionOutput, called: bool, max_tokens: int) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence`` of a message."""
    if completion.finish_reason == "length":
        reason = "max_tokens" if len(completion.token_ids) >= max_tokens else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def blocks_of(message: Message) -> list[Block]:
    """The content blocks of a whole message."""
    return [_block(part) for part in message.parts]


def _block(part: MessagePart) -> Block:
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": CALL_ID_PREFIX + part.id, "name": part.name, "input": _input(part.arguments)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


class ContentBlockStream:
    """Builds the events of a streamed message, one content block after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""
        """Type of the open block."""

    def add(self, delta: Delta) -> bytes:
        """Add a delta to the content blocks; returns its events."""
        events = b""
        for part in delta:
            if isinstance(part, CallDelta):
                events += self._call(part)
            elif part.kind == "reasoning":
                events += self._ensure_open("thinking", {"thinking": "", "signature": ""})
                events += self._delta(type="thinking_delta", thinking=part.text)
            else:
                events += self._ensure_open("text", {"text": ""})
                events += self._delta(type="text_delta", text=part.text)
        return events

    def end(self) -> bytes:
        """End the open block; returns its event."""
        ended = event("content_block_stop", index=self._index) if self._open else b""
        self._open = ""
        return ended

    def _call(self, part: CallDelta) -> bytes:
        events = b""
        if part.id:
            events += self.end() + self._begin(
                "tool_use", {"id": CALL_ID_PREFIX + part.id, "name": part.name, "input": {}}
            )
        return events + (self._delta(type="input_json_delta", partial_json=part.arguments) if part.arguments else b"")

    def _ensure_open(self, kind: str, empty: Block) -> bytes:
        return b"" if self._open == kind else self.end() + self._begin(kind, empty)

    def _begin(self, kind: str, empty: Block) -> bytes:
        self._index += 1
        self._open = kind
        return event("content_block_start", index=self._index, content_block={"type": kind, **empty})

    def _delta(self, **delta: str) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)


def _input(arguments: str) -> Any:
    """The arguments of a call as an object; empty where they are not one."""
    try:
        result = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}
