"""Requests and responses of OpenAI's API, with the fields that vLLM and FastDeploy add. Chat requests are defined in
``serve/chat/request.py``; schemas of embeddings, scores and audio are in the modules of their handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.core.errors import invalid
from penstock.core.sampling import MAX_LOGPROBS
from penstock.frontend.fair_queue import FairQueue
from penstock.frontend.outputs import Logprob, PositionLogprobs, RequestOutput
from penstock.serve.chat.request import (
    UNSUPPORTED,
    ChatRequest,
    Count,
    GenerationRequest,
    Message,
    NonEmptyText,
    TokenId,
    TokenIds,
    Tool,
)
from penstock.serve.http.body import Reading, RequestBody, Unsupported, unsupported
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.reply import DONE, encode
from penstock.serve.http.status import STATUS

T = TypeVar("T")
MAX_PROMPTS = 2048
"""Maximum number of prompts in a request."""
PROMPT_SCHEMAS = [
    {"type": "string"},
    {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_PROMPTS,
        "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    },
]
Prompts = Annotated[
    str | Annotated[list[str | TokenId | TokenIds], msgspec.Meta(min_length=1)],
    msgspec.Meta(extra_json_schema={"anyOf": PROMPT_SCHEMAS}),
]
"""One or several prompts, as texts or lists of token ids."""
CHUNK_SIZE = 32
"""Number of positions (tokens) for which logprobs are encoded in one turn of the event loop."""
MIN_LOGPROB = -9999.0
"""Log probability that replaces minus infinity, which JSON cannot represent."""
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
FIELD_NAMES = {"bad_word_ids": "bad_words_token_ids"}
"""Internal field name → field name in OpenAI's API, for errors."""
CHAT_FIELD_NAMES = FIELD_NAMES | {"prompt": "messages"}
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
"""Metadata of stored objects, within the limits of OpenAI's API."""


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    prompt: Prompts
    prompt_token_ids: Annotated[list[TokenId | TokenIds], msgspec.Meta(min_length=1)] | None = None
    """Prompts as token ids, used instead of ``prompt`` (FastDeploy)."""
    max_tokens: Count | None = None
    """Maximum number of generated tokens. Default: 16; 0 requires ``echo``."""
    echo: bool | None = None
    """Return the prompt before the completion."""
    suffix: str | Annotated[dict[str, Any], msgspec.Meta(max_length=0)] | None = None
    """Text after the completion (fill-in-the-middle). FastDeploy's clients send an empty object instead of null."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


CHAT_ONLY = "is for chats only; leave it out, or use /v1/chat/completions"
CHAT_ONLY_FIELDS = frozenset(ChatRequest.__struct_fields__).difference(CompletionRequest.__struct_fields__)
CompletionRequest.reading = Reading(
    unsupported=UNSUPPORTED
    | {
        name: Unsupported(CHAT_ONLY, UNSUPPORTED[name].neutral if name in UNSUPPORTED else (), Code.INVALID)
        for name in CHAT_ONLY_FIELDS
    }
).accepting(CompletionRequest)


class TokenizeRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to tokenize a prompt or messages."""

    reading: ClassVar = Reading(
        unsupported=unsupported({"chat_template": (), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},)})
    )

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[TokenId]


class LoadAdapterRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Request to load a LoRA adapter in PEFT's format."""

    lora_name: NonEmptyText
    """Name of the adapter, which requests send as ``model``."""
    lora_path: NonEmptyText
    """Folder of the adapter on the server."""
    base_model_name: str | None = None
    """Served model that the adapter is for. Default: the first model."""


class UnloadAdapterRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    lora_name: NonEmptyText
    lora_int_id: int | None = None


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
    """Same as ``token_ids``, for FastDeploy's clients."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | UnsetType = UNSET

    def chunks(self) -> list[CompletionChoice]:
        """Split the choice for a stream: like OpenAI, send the finish reason in a separate chunk after the text."""
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


class TokenLogprob(TopLogprob, kw_only=True, gc=False):
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
    status: Literal["incomplete"] | UnsetType = UNSET
    """The answer was cut off within the arguments."""


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """New part of a tool call: id, type and name in the first delta of the call, and a part of the arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta
    status: Literal["incomplete"] | UnsetType = UNSET
    """The answer was cut off within the arguments; in the last delta of the call."""


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning: str | UnsetType | None = None
    """Reasoning text. ``reasoning`` is vLLM's current field name, ``reasoning_content`` the older one."""
    reasoning_content: str | UnsetType | None = None
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    completion_token_ids: list[int] | UnsetType = UNSET
    """Same as ``ChatChoice.token_ids``, for FastDeploy's clients."""
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """New reasoning text; omitted if empty, as in vLLM."""
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


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    parent: str | None = None
    """Base model of an adapter; None for a model."""
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
    """Same as ``prompt``, for llama-server's clients."""


class OpenAIErrorFormat(ErrorFormat):
    stream_end = b"\n\n" + DONE

    def document(self, failure: Failure) -> ErrorResponse:
        return error_of(failure)


async def encode_in_chunks(items: Sequence[T], make: Callable[[T], Any], fair_queue: FairQueue) -> Any:
    """Return the list of ``make(item)``, to be encoded by msgspec. Long lists are encoded here, in chunks, one per turn
    of the event loop."""
    if len(items) <= CHUNK_SIZE:
        return list(map(make, items))
    parts = []
    for start in range(0, len(items), CHUNK_SIZE):
        await fair_queue.wait_turn()
        parts.append(encode(list(map(make, items[start : start + CHUNK_SIZE])))[1:-1])
    return join_json(parts)


def join_json(parts: Sequence[bytes]) -> msgspec.Raw:
    """Join encoded list elements (separated by commas in each part) to a JSON list."""
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def error_of(failure: Failure) -> ErrorResponse:
    """Convert a failure to OpenAI's error response."""
    no_model = failure.code is Code.NOT_FOUND and failure.field == "model"
    message = failure.message
    if failure.code is Code.TOO_LONG:  # LiteLLM and LangChain recognize the error by this message
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
    """Token counts of the prompts and sequences of a request, minus ``num_hidden_tokens`` per sequence."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(max(len(m.token_ids) - num_hidden_tokens, 0) for output in outputs for m in output.outputs)
    completion_tokens += sum(output.num_discarded_tokens for output in outputs)  # OpenAI counts them for best_of
    cached = sum(output.num_cached_tokens for output in outputs)
    reasoning = sum(m.reasoning_tokens for output in outputs for m in output.outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion_tokens,
        total_tokens=prompt + completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(reasoning_tokens=reasoning),
    )


def token_of(token_id: int, logprob: Logprob, as_id: bool | None) -> str:
    """The name of a token in logprobs: the text, or ``token_id:ID`` if ``as_id`` (``return_tokens_as_token_ids``)."""
    return f"token_id:{token_id}" if as_id else logprob.decoded_token


async def prompt_logprobs_of(output: RequestOutput, fair_queue: FairQueue) -> Any:
    """The ``prompt_logprobs`` of a prompt in vLLM's format."""
    return await encode_in_chunks(output.prompt_logprobs or [], _by_id, fair_queue)


def _by_id(position: PositionLogprobs | None) -> dict[int, dict[str, Any]] | None:
    if position is None:
        return None
    return {
        token_id: {"logprob": max(p.logprob, MIN_LOGPROB), "rank": p.rank, "decoded_token": p.decoded_token}
        for token_id, p in position.items()
    }


def one_or_several(given: str | Sequence[str | int | list[int]], field: str, what: str) -> list[str] | list[list[int]]:
    """Read the prompts of a field: a list of texts, or a list of token id lists.

    Args:
        field: name of the field, for errors.
        what: plural noun for the prompts, for errors.

    Raises ``PenstockError`` (``invalid``) if texts and token ids are mixed, or there are too many prompts.
    """
    if isinstance(given, str):
        return [given]
    if len({type(entry) for entry in given}) > 1:
        raise invalid(field, "mixes texts, token ids and lists of token ids; use only one of these types")
    if isinstance(given[0], int):
        return [cast(list[int], given)]
    if len(given) > MAX_PROMPTS:
        raise invalid(field, f"has {len(given)} {what}; the maximum is {MAX_PROMPTS}", MAX_PROMPTS)
    return cast(list[str], given)
