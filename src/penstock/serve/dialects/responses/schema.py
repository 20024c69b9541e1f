"""Requests of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.serve.chat.request import TOOL_NAME, Count, NonEmptyText, Number, Seed
from penstock.serve.dialects.openai.schema import Metadata
from penstock.serve.http.body import Reading, RequestBody, Unsupported

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
STATELESS = "the server keeps no state between requests: send the conversation as input, or start it with --storage-dir"
KEEPS_NOTHING = "nothing is kept here; send false, or start the server with --storage-dir"
STORED_FIELDS = {
    "previous_response_id": Unsupported(STATELESS),
    "conversation": Unsupported(STATELESS),
    "store": Unsupported(KEEPS_NOTHING, (False,)),
    "background": Unsupported(KEEPS_NOTHING, (False,)),
}
"""Fields that are refused where nothing is stored."""
UNSUPPORTED = {
    "prompt": Unsupported("no prompts are kept here: send instructions and input"),
    "truncation": Unsupported("no input is cut; send disabled, and less input", ("disabled",)),
    "context_management": Unsupported("no input is made shorter; send less of it"),
    "moderation": Unsupported("nothing is moderated here"),
    "top_logprobs": Unsupported("is not supported yet; /v1/chat/completions has it", (0,)),
}


class Part(msgspec.Struct, omit_defaults=True):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    """Of answers that clients send back; no effect, as the one above."""


class Item(msgspec.Struct, kw_only=True):
    """A message, a function call, its output, or reasoning."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None

    id: str | None = None
    status: str | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None
    """Of the output of responses that clients send back; no effect, as the three above."""


class Tool(msgspec.Struct, kw_only=True):
    """A function, or a namespace of functions."""

    type: str
    name: Annotated[str, msgspec.Meta(pattern=TOOL_NAME)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[Tool] | None = None


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


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
    """No effect: the reasoning itself is returned."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Its older name."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ConversationReference(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str


class CountTokensRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """The fields that determine the prompt. A field that is null is taken as absent."""

    reading: ClassVar = Reading(unsupported=UNSUPPORTED)

    input: str | Annotated[list[Item], msgspec.Meta(min_length=1)]
    model: str | None = None
    """Absent or "default": the one that is served."""
    instructions: str | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's addition."""

    previous_response_id: Annotated[str, msgspec.Meta(max_length=160)] | None = None
    """A stored response, whose conversation ``input`` continues."""
    conversation: str | ConversationReference | None = None
    """A conversation, whose items come before ``input``, and to which the request's items and the answer are added."""


def conversation_of(request: CountTokensRequest) -> str | None:
    """The id of a request's conversation."""
    given = request.conversation
    return given.id if isinstance(given, ConversationReference) else given


class ResponsesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None

    store: bool | None = None
    """Whether the server keeps the response; by default it does where it can (``storage_dir``)."""
    background: bool | None = None
    """Answer at once, and compute the response meanwhile; it has to be stored."""
    prompt: None = None
    context_management: None = None
    moderation: None = None
    top_logprobs: int | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    max_tool_calls: Count | None = None
    """Limit of calls of built-in tools; ignored, as there are none."""
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
    """vLLM's additions."""


MAX_ADDED = 20
"""Items that may be added to a conversation at a time."""


class ConversationRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """A new conversation."""

    items: Annotated[list[Item], msgspec.Meta(max_length=MAX_ADDED)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(RequestBody, kw_only=True, forbid_unknown_fields=True):
    metadata: Metadata | None


class ItemsRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Items for a conversation."""

    items: Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MAX_ADDED)]
