"""What clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.serve.openai.schema import TOOL_NAME, Count, Number, Seed, Words

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Part(msgspec.Struct):
    """Of an item's content."""

    type: str
    text: str | None = None


class Item(msgspec.Struct, kw_only=True):
    """A message, a call that was made, what came of it, or a thought."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, msgspec.Meta(pattern=TOOL_NAME)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


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
    """The thought itself is given."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A field that is null is one that is not given."""

    input: str | Annotated[list[Item], msgspec.Meta(min_length=1)]
    model: str | None = None
    """Absent or "default": the one that is served."""
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[Number, msgspec.Meta(gt=0, le=1)] | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    max_tool_calls: Count | None = None
    """Of tools that a server has of its own; this one has none."""
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: Words | list[Words] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's additions."""


NOT_KEPT = {
    "previous_response_id": "nothing is kept between requests: send what was said as input",
    "conversation": "nothing is kept between requests: send what was said as input",
    "prompt": "no prompts are kept here: send instructions and input",
}
"""Fields that ask for what a server keeps, and what to do instead."""
REQUESTS = (ResponsesRequest,)
