"""Ollama's requests and responses: JSON objects, one per line in a stream. A null request field counts as absent."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput
from penstock.serve.dialects.openai.schema import TokenLogprob
from penstock.serve.http.body import Reading, RequestBody
from penstock.serve.http.error_format import ErrorFormat

MEDIA_TYPE = b"application/x-ndjson"
NANOSECONDS = 10**9
Think = bool | Literal["low", "medium", "high"]
KeepAlive = str | float
Format = Literal["", "json"] | dict[str, Any]


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Base64 images."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    """Id of the tool call that produced this message (a tool result)."""


class OllamaRequest(RequestBody, kw_only=True):
    """Fields of all Ollama requests."""

    reading: ClassVar = Reading(lax="", drops_null=True)

    model: str | None = None
    """Name of a served model, with or without ``:latest``."""
    options: dict[str, Any] | None = None
    """Sampling parameters under Ollama's names."""
    keep_alive: KeepAlive | None = None
    """Time for which the model stays loaded after the request: a duration (``5m``) or seconds; 0: unload it at once;
    negative: keep it loaded."""


class ShowRequest(OllamaRequest, kw_only=True):
    name: str | None = None
    """Older name of ``model``."""
    verbose: bool | None = None
    """Ignored: the response is never verbose."""


class OllamaGeneration(OllamaRequest, kw_only=True):
    """Fields of chat and generate requests."""

    stream: bool | None = None
    """Stream the response. Default: true."""
    format: Format | None = None
    """``json``, or a JSON Schema of the output."""
    think: Think | None = None
    """True or False: enable or disable thinking; a string: passed to the chat template as ``reasoning_effort``."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class ChatRequest(OllamaGeneration, kw_only=True):
    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    """Chat history. If empty, the request only loads the model, or with ``keep_alive`` 0 unloads it."""
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(OllamaGeneration, kw_only=True):
    prompt: str = ""
    """Text of the user. If empty, the request only loads the model, or with ``keep_alive`` 0 unloads it."""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    """Complete the prompt without the chat template."""
    suffix: str | None = None
    """Text after the completion (fill-in-the-middle)."""
    template: str | None = None
    context: list[int] | None = None


class EmbedRequest(OllamaRequest, kw_only=True):
    input: str | list[str]
    truncate: bool | None = None
    """Truncate texts beyond the context length instead of rejecting them. Default: true."""
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


class EmbeddingsRequest(OllamaRequest, kw_only=True):
    prompt: str


class OllamaErrorFormat(ErrorFormat):
    dialect = "ollama"
    stream_start, stream_end = b"", b"\n"

    def document(self, failure: Failure) -> object:
        return {"error": failure.message}


ERROR_FORMAT = OllamaErrorFormat()


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """A full chat or generate response, or one line of a stream."""

    model: str
    created_at: str
    message: AnswerMessage | UnsetType = UNSET
    """Output of a chat request."""
    response: str | UnsetType = UNSET
    """Output of a generate request."""
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    """Nanoseconds from arrival to the last token. All durations are in nanoseconds."""
    load_duration: int | UnsetType = UNSET
    """Time in the queue, nanoseconds."""
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OneEmbedding(msgspec.Struct, kw_only=True):
    embedding: list[float]


class Embeddings(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


def now() -> str:
    """The current time in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def finish(answer: Answer, output: RequestOutput, reason: str) -> Answer:
    """Set the fields of a full response or last line: finish reason, token counts and durations."""
    times, completion = output.times, output.outputs[0]
    answer.done, answer.done_reason = True, reason
    answer.prompt_eval_count = len(output.prompt_token_ids)
    answer.eval_count = len(completion.token_ids)
    first, last = times.first_token or times.arrived, times.last_token or times.arrived
    answer.total_duration = int((last - times.arrived) * NANOSECONDS)
    answer.load_duration = int(times.queued * NANOSECONDS)
    answer.prompt_eval_duration = int((first - times.arrived - times.queued) * NANOSECONDS)
    answer.eval_duration = int((last - first) * NANOSECONDS)
    return answer
