"""Responses of OpenAI's API, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.frontend.fair_queue import FairQueue
from penstock.frontend.outputs import Logprob, PositionLogprobs, RequestOutput
from penstock.serve.http.status import STATUS

T = TypeVar("T")

PIECE_SIZE = 32
"""Positions whose logprobs are encoded in one turn of the event loop."""
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
ERROR_TYPES = {
    Code.UNAUTHORIZED: "authentication_error",
    Code.NOT_FOUND: "not_found_error",
    Code.NOT_ALLOWED: "method_not_allowed_error",
    Code.OVERLOADED: "rate_limit_error",
    Code.UNAVAILABLE: "service_unavailable_error",
    Code.INTERNAL: "internal_error",
    Code.TIMEOUT: "timeout_error",
}
ERROR_CODES = {
    Code.UNAUTHORIZED: "invalid_api_key",
    Code.OVERLOADED: "rate_limit_exceeded",
    Code.TOO_LONG: "context_length_exceeded",
}


class Error(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorResponse(msgspec.Struct, kw_only=True):
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
    completion_token_ids: list[int] | UnsetType = UNSET
    """The same, as FastDeploy calls them."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | UnsetType = UNSET

    def chunks(self) -> list[CompletionChoice]:
        """The choice in a stream: the finish reason follows the text in a chunk of its own, as OpenAI sends it."""
        if self.finish_reason is None or not (self.text or self.logprobs or self.token_ids):
            return [self]
        end = CompletionChoice(
            index=self.index, text="", finish_reason=self.finish_reason, stop_reason=self.stop_reason
        )
        if self.token_ids is not UNSET:
            end.token_ids = end.completion_token_ids = []
        return [msgspec.structs.replace(self, finish_reason=None, stop_reason=None), end]


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, kw_only=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class ResponseFunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ResponseToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: ResponseFunctionCall


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The first delta of a call has its id, type and name; each has a piece of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning: str | UnsetType | None = None
    """The reasoning, under vLLM's present name and its older one (``reasoning_content``)."""
    reasoning_content: str | UnsetType | None = None
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    completion_token_ids: list[int] | UnsetType = UNSET
    """For FastDeploy's clients."""
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """Absent where there is none, as in vLLM."""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    completion_token_ids: list[int] | UnsetType = UNSET


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


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | UnsetType = UNSET


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Score(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RerankDocument(msgspec.Struct, kw_only=True):
    text: str


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    """Of the document in the request."""
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: str
    """The likeliest class."""
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage


class Pooled(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    parent: str | None = None
    """The base model of an adapter."""
    max_model_len: int | None


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str
    content: str
    """The same, as llama-server calls it."""


RESPONSES = (
    Completion,
    ChatCompletion,
    EmbeddingResponse,
    ScoreResponse,
    RerankResponse,
    ClassifyResponse,
    PoolResponse,
    ModelList,
    Model,
    TokenizeResponse,
    DetokenizeResponse,
    ErrorResponse,
)

FIELD_NAMES = {"bad_word_ids": "bad_words_token_ids"}
"""Internal field names → OpenAI's, for errors."""
CHAT_FIELD_NAMES = FIELD_NAMES | {"prompt": "messages"}
encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(answer: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(answer) + b"\n\n"


async def encode_in_pieces(items: Sequence[T], make: Callable[[T], Any], fair_queue: FairQueue) -> Any:
    """A list of ``make(item)`` for msgspec to encode; a long one is encoded in pieces, with turns of other requests in
    between."""
    if len(items) <= PIECE_SIZE:
        return list(map(make, items))
    parts = []
    for start in range(0, len(items), PIECE_SIZE):
        await fair_queue.wait_turn()
        parts.append(encode(list(map(make, items[start : start + PIECE_SIZE])))[1:-1])
    return join_json(parts)


def join_json(parts: Sequence[bytes]) -> msgspec.Raw:
    """A JSON list of parts that hold encoded elements."""
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def error_of(failure: Failure) -> ErrorResponse:
    """A failure in OpenAI's format."""
    no_model = failure.code is Code.NOT_FOUND and failure.field == "model"
    message = failure.message
    if failure.code is Code.TOO_LONG:  # LiteLLM and LangChain look for this message
        longest = f"This model's maximum context length is {failure.limit:.0f} tokens."
        requested = f"However, your {failure.field} resulted in {failure.value:.0f} tokens."
        message = f"{longest} {requested} Please reduce the length of the {failure.field}."
    return ErrorResponse(
        error=Error(
            message=message,
            type=ERROR_TYPES.get(failure.code, "invalid_request_error"),
            param=failure.field or None,
            code="model_not_found" if no_model else ERROR_CODES.get(failure.code, STATUS[failure.code]),
        )
    )


def usage_of(outputs: list[RequestOutput], num_hidden_tokens: int = 0) -> Usage:
    """Token counts of a request's prompts and all their sequences, less ``num_hidden_tokens`` per sequence."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(max(len(m.token_ids) - num_hidden_tokens, 0) for output in outputs for m in output.outputs)
    completion_tokens += sum(output.num_discarded_tokens for output in outputs)  # OpenAI counts them, too
    cached = sum(output.num_cached_tokens for output in outputs)
    thought = sum(m.reasoning_tokens for output in outputs for m in output.outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion_tokens,
        total_tokens=prompt + completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(reasoning_tokens=thought),
    )


def token_of(token_id: int, logprob: Logprob, as_id: bool | None) -> str:
    """A token's name among logprobs: its text, or with ``return_tokens_as_token_ids`` its id."""
    return f"token_id:{token_id}" if as_id else logprob.decoded_token


async def prompt_logprobs_of(output: RequestOutput, fair_queue: FairQueue) -> Any:
    """``prompt_logprobs`` as in vLLM; unset where they were not requested."""
    return (
        UNSET if output.prompt_logprobs is None else await encode_in_pieces(output.prompt_logprobs, _by_id, fair_queue)
    )


def _by_id(position: PositionLogprobs | None) -> dict[int, dict[str, Any]] | None:
    return (
        None
        if position is None
        else {
            token_id: {"logprob": max(p.logprob, MIN_LOGPROB), "rank": p.rank, "decoded_token": p.decoded_token}
            for token_id, p in position.items()
        }
    )
