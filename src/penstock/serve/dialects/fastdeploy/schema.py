"""FastDeploy's responses and stream chunks.

FastDeploy writes every field of a full response (null without a value) and omits unset fields from chunks. ``UNSET``
marks a field that a chunk omits.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from penstock.frontend.outputs import RequestOutput

from ..openai import schema as openai

Reason = Literal["stop", "length", "tool_calls"] | None
PromptLogprobs = list[dict[int, dict[str, Any]] | None] | None


class PromptDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    image_tokens: int | UnsetType | None = UNSET
    video_tokens: int | UnsetType | None = UNSET


class CompletionDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int
    image_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, outputs: list[RequestOutput], num_hidden_tokens: int = 0) -> Self:
        """Make the token counts of a chunk, without image and video tokens."""
        usage = openai.usage_of(outputs, num_hidden_tokens)
        return cls(
            prompt_tokens=usage.prompt_tokens,
            total_tokens=usage.total_tokens,
            completion_tokens=usage.completion_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            completion_tokens_details=CompletionDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
        )


class TopLogprob(openai.TopLogprob, kw_only=True, gc=False):
    top_logprobs: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    multimodal_content: None = None
    reasoning_content: str | None
    audio_content: None = None
    tool_calls: list[openai.ResponseToolCall] | None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    prompt_tokens: str | None = None
    """The prompt as text, with ``return_token_ids``."""
    completion_tokens: str | None = None
    """The raw generated text, including reasoning and tool calls, with ``return_token_ids``."""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: openai.ChatLogprobs | None
    draft_logprobs: None = None
    prompt_logprobs: PromptLogprobs
    finish_reason: Reason
    speculate_metrics: None = None


class FirstDelta(msgspec.Struct, kw_only=True):
    """Delta of the first chunk of a sequence, without generated text."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str = ""
    tool_calls: None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: None = None
    prompt_tokens: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    content: str
    reasoning_content: str | None
    tool_calls: list[openai.ToolCallDelta] | None
    prompt_token_ids: None = None
    completion_token_ids: list[int] | None = None
    completion_tokens: str | None = None


class FirstChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: FirstDelta
    prompt_logprobs: PromptLogprobs


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: openai.ChatLogprobs | None
    draft_logprobs: None = None
    arrival_time: float | None
    """Seconds since the request's first step."""
    speculate_metrics: None = None
    finish_reason: Reason | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    prompt_tokens: str | None = None
    completion_tokens: str | None = None
    arrival_time: None = None
    logprobs: openai.CompletionLogprobs | None
    draft_logprobs: None = None
    prompt_logprobs: PromptLogprobs
    reasoning_content: None = None
    finish_reason: Reason
    tool_calls: None = None
    speculate_metrics: None = None


class FirstCompletionChoice(msgspec.Struct, kw_only=True):
    """The first chunk of a sequence with ``return_token_ids``, without generated text."""

    index: int
    text: str = ""
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs
    prompt_tokens: str
    completion_token_ids: None = None


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    prompt_token_ids: None = None
    completion_token_ids: list[int] | None = None
    tool_calls: None = None
    completion_tokens: str | None = None
    reasoning_content: None = None
    arrival_time: float | None
    logprobs: openai.CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs
    draft_logprobs: None = None
    speculate_metrics: None = None
    finish_reason: Reason | UnsetType = UNSET


class CompletionChunk(openai.Completion, kw_only=True):
    metrics: None = None
