"""What clients get, whole and in chunks."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.frontend.outputs import Position, RequestOutput
from penstock.serve.status import STATUS

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
KINDS = {
    Code.UNAUTHORIZED: "authentication_error",
    Code.NOT_FOUND: "not_found_error",
    Code.OVERLOADED: "rate_limit_error",
    Code.UNAVAILABLE: "service_unavailable_error",
    Code.INTERNAL: "internal_error",
    Code.TIMEOUT: "timeout_error",
}
CODES = {Code.UNAUTHORIZED: "invalid_api_key", Code.OVERLOADED: "rate_limit_exceeded"}


class Error(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    error: Error


class PromptDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Likely(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Likely]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCallAnswer(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The first of a call has its id, type and name, and all have what is new of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str | UnsetType = UNSET
    """The thought before it."""
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | UnsetType = UNSET


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class PairScore(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class Scores(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    parent: str | None = None
    """The model that an adapter is for."""
    max_model_len: int | None


class Models(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


ANSWERS = (Completion, Chat, Embeddings, Scores, Models, Model, Tokenized, Detokenized, ErrorAnswer)

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(answer: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(answer) + b"\n\n"


def error_of(failure: Failure) -> ErrorAnswer:
    """A failure in OpenAI's shape."""
    no_model = failure.code is Code.NOT_FOUND and failure.field == "model"
    return ErrorAnswer(
        error=Error(
            message=failure.message.encode("utf-8", "replace").decode(),
            type=KINDS.get(failure.code, "invalid_request_error"),
            param=failure.field.encode("utf-8", "replace").decode() or None,
            code="model_not_found" if no_model else CODES.get(failure.code, STATUS[failure.code]),
        )
    )


def usage_of(outputs: list[RequestOutput], untold: int = 0) -> Usage:
    """Tokens of a request's prompts and all their sequences, but for ``untold`` a sequence."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(max(len(m.token_ids) - untold, 0) for output in outputs for m in output.outputs)
    made += sum(output.untold_tokens for output in outputs)  # which OpenAI counts, too
    cached = sum(output.num_cached_tokens for output in outputs)
    thought = sum(m.reasoning_tokens for output in outputs for m in output.outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=made,
        total_tokens=prompt + made,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(reasoning_tokens=thought),
    )


def prompt_logprobs_of(output: RequestOutput) -> list[dict[int, dict[str, Any]] | None] | UnsetType:
    """As vLLM gives them; unset where they were not asked for."""
    if output.prompt_logprobs is None:
        return UNSET
    return [None if position is None else _by_id(position) for position in output.prompt_logprobs]


def _by_id(position: Position) -> dict[int, dict[str, Any]]:
    return {
        token_id: {"logprob": max(p.logprob, LEAST), "rank": p.rank, "decoded_token": p.decoded_token}
        for token_id, p in position.items()
    }
