"""Anthropic's requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.serve.chat.request import TOOL_NAME, NonEmptyText, Number


class ImageSource(msgspec.Struct, kw_only=True):
    """Of an image block: base64 data, or a URL."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct, kw_only=True):
    """A part of a message."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    """Id of the call that a tool result answers."""
    source: ImageSource | None = None
    content: str | list[Block] | None = None

    signature: str | None = None
    is_error: bool | None = None
    citations: list[Any] | dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """No effect, as the three above."""


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
    """No effect, as the one above: calls are streamed in any case."""


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
    """Passed to the chat template, if it reads it."""


class ContextEdit(msgspec.Struct, kw_only=True):
    type: Literal["clear_thinking_20251015"]
    """No effect: the chat template decides which earlier reasoning is kept."""


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    edits: list[ContextEdit] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that determine the prompt."""

    model: str | None = None
    """Absent or "default": the one that is served."""
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """No effect: prefixes are always cached."""
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


UNSUPPORTED_FIELDS: dict[str, tuple[Any, str]] = {
    "container": (None, "nothing is run here"),
    "thread": (None, "the server keeps no state between requests: send the whole conversation"),
    "mcp_servers": ([], "nothing is run here; send the tools, and call them yourself"),
}
"""Unsupported fields, with the value that is accepted and the error for others."""
