"""Requests of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.serve.chat.request import TOOL_NAME, Count, NonEmptyText, Number, Seed
from penstock.serve.dialects.openai.schema import Metadata
from penstock.serve.http.body import Reading, RequestBody, Unsupported

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
STATELESS = "the server keeps no state between requests: send the conversation as input, or start it with --storage-dir"
NO_STORAGE = "the server stores no responses: send false, or start the server with --storage-dir"
STORED_FIELDS = {
    "previous_response_id": Unsupported(STATELESS),
    "conversation": Unsupported(STATELESS),
    "store": Unsupported(NO_STORAGE, (False,)),
    "background": Unsupported(NO_STORAGE, (False,)),
}
"""Fields that are rejected if the server stores no responses."""
UNSUPPORTED = {
    "prompt": Unsupported("the server stores no prompts: send instructions and input"),
    "truncation": Unsupported("the server does not truncate input: send disabled, and a shorter input", ("disabled",)),
    "context_management": Unsupported("the server does not compact input: send a shorter input, without this field"),
    "moderation": Unsupported("the server does not moderate content: leave this field out"),
    "top_logprobs": Unsupported("is not supported yet; use /v1/chat/completions", (0,)),
}


class Part(msgspec.Struct, omit_defaults=True):
    """A content part of an item."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    """Ignored, like ``annotations``: clients copy both fields from earlier outputs."""


class Item(msgspec.Struct, kw_only=True):
    """A message, a function call, a function call output, reasoning, an item reference, or an item of an MCP server."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    server_label: str | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools of an MCP server (``mcp_list_tools``)."""
    error: Any = None
    """Error of an MCP call or list: a text, or an object in responses of OpenAI."""
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None
    """Reason of the user in an ``mcp_approval_response``."""

    id: str | None = None
    """Id of the referenced item in an item reference, or of an approval request; otherwise ignored."""
    status: str | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None
    """Ignored, like ``status`` and ``summary``: clients copy these fields from earlier outputs."""


class ToolFilter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Selection of tools of an MCP server: tools that match all fields."""

    tool_names: list[str] | None = None
    read_only: bool | None = None
    """Value of the annotation readOnlyHint, which is false if the server does not send it."""


class ApprovalFilter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tools of an MCP server that need, or do not need, an approval."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A function, a namespace of functions, or an MCP server."""

    type: str
    name: Annotated[str, msgspec.Meta(pattern=TOOL_NAME)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[Tool] | None = None

    server_label: str | None = None
    """Name of an MCP server: of ``mcp_config``, or any name if there is a URL."""
    server_url: str | None = None
    server_description: str | None = None
    allowed_tools: list[str] | ToolFilter | None = None
    """Tools that the model may call; absent: all."""
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None
    """Tools that are only called after an approval by the client. Default: always."""
    headers: dict[str, str] | None = None
    """HTTP headers for the MCP server."""
    authorization: str | None = None
    """OAuth access token for the MCP server."""
    connector_id: str | None = None


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["function", "mcp"]
    name: str
    server_label: str | None = None


class Format(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class Text(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Format | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: the full reasoning is returned instead of a summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Older name of ``summary``."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ConversationReference(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str


class CountTokensRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to count tokens: the fields that determine the prompt. A null field counts as absent."""

    reading: ClassVar = Reading(unsupported=UNSUPPORTED)

    input: str | Annotated[list[Item], msgspec.Meta(min_length=1)]
    model: str | None = None
    """Name of a served model or adapter; absent or "default": the first model."""
    instructions: str | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template (vLLM)."""

    previous_response_id: Annotated[str, msgspec.Meta(max_length=160)] | None = None
    """Id of a stored response whose conversation ``input`` continues."""
    conversation: str | ConversationReference | None = None
    """Id of a conversation. Its items are put before ``input``; input and output are added to the conversation."""


def conversation_of(request: CountTokensRequest) -> str | None:
    """The conversation id of a request; None without a conversation."""
    given = request.conversation
    return given.id if isinstance(given, ConversationReference) else given


class ResponsesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None

    store: bool | None = None
    """Store the response. Default: true if the server stores responses (``storage_dir``)."""
    background: bool | None = None
    """Respond at once, and compute the response in the background; requires ``store``."""
    prompt: None = None
    context_management: None = None
    moderation: None = None
    top_logprobs: int | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    max_tool_calls: Count | None = None
    """Maximum number of calls of tools of MCP servers; further calls get an error."""
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None

    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: NonEmptyText | list[NonEmptyText] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Scheduling priority; lower values run first. The fields from ``top_k`` on are vLLM's additions."""


MAX_ADDED = 20
"""Maximum number of items added to a conversation by one request."""


class ConversationRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to create a conversation."""

    items: Annotated[list[Item], msgspec.Meta(max_length=MAX_ADDED)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(RequestBody, kw_only=True, forbid_unknown_fields=True):
    metadata: Metadata | None


class ItemsRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to add items to a conversation."""

    items: Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MAX_ADDED)]
