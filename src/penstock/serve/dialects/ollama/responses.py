"""Ollama's answers: documents, or lines of JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput
from penstock.serve.dialects.openai.responses import TokenLogprob
from penstock.serve.http.error_format import ErrorFormat

MEDIA_TYPE = b"application/x-ndjson"
NANOSECONDS = 10**9

encode = msgspec.json.Encoder().encode


class OllamaErrorFormat(ErrorFormat):
    dialect = "ollama"

    def error(self, failure: Failure) -> bytes:
        return encode({"error": failure.message})

    def stream_error(self, failure: Failure) -> bytes:
        return self.error(failure) + b"\n"


ERROR_FORMAT = OllamaErrorFormat()


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """A whole answer, or a line of one."""

    model: str
    created_at: str
    message: AnswerMessage | UnsetType = UNSET
    """Of a chat."""
    response: str | UnsetType = UNSET
    """Of a generation."""
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    """Nanoseconds, as all durations."""
    load_duration: int | UnsetType = UNSET
    """Time in the queue."""
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


def now() -> str:
    """The time in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def finish(answer: Answer, output: RequestOutput) -> Answer:
    """Add what the end of an answer has."""
    times, completion = output.times, output.outputs[0]
    answer.done, answer.done_reason = True, completion.finish_reason or "stop"
    answer.prompt_eval_count = len(output.prompt_token_ids)
    answer.eval_count = len(completion.token_ids)
    first, last = times.first_token or times.arrived, times.last_token or times.arrived
    answer.total_duration = int((last - times.arrived) * NANOSECONDS)
    answer.load_duration = int(times.queued * NANOSECONDS)
    answer.prompt_eval_duration = int((first - times.arrived - times.queued) * NANOSECONDS)
    answer.eval_duration = int((last - first) * NANOSECONDS)
    return answer


class OneEmbedding(msgspec.Struct, kw_only=True):
    embedding: list[float]


class Embeddings(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int
