"""llama-server's answers: documents, and events of their parts."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.status import STATUS

encode = msgspec.json.Encoder().encode

ERROR_PATHS = ("/completion", "/infill", "/props", "/slots", "/apply-template", "/embedding")
ERROR_TYPES = {
    Code.INVALID: "invalid_request_error",
    Code.TOO_LARGE: "invalid_request_error",
    Code.TOO_LONG: "exceed_context_size_error",
    Code.UNAUTHORIZED: "authentication_error",
    Code.NOT_FOUND: "not_found_error",
    Code.UNSUPPORTED: "not_supported_error",
    Code.OVERLOADED: "unavailable_error",
    Code.UNAVAILABLE: "unavailable_error",
}
FIELD_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
MILLISECONDS = 1000


class LlamaServerErrorFormat(ErrorFormat):
    dialect = "llama-server"

    def error(self, failure: Failure) -> bytes:
        named = rename_field(failure, FIELD_NAMES)
        error: dict[str, Any] = {
            "code": STATUS[failure.code],
            "message": named.message,
            "type": ERROR_TYPES.get(failure.code, "server_error"),
        }
        if failure.code is Code.TOO_LONG:
            error |= {"n_prompt_tokens": failure.value, "n_ctx": failure.limit}
        return encode({"error": error})

    def stream_error(self, failure: Failure) -> bytes:
        return b"data: " + self.error(failure) + b"\n\n"


ERROR_FORMAT = LlamaServerErrorFormat()


class TopProbability(msgspec.Struct, kw_only=True, gc=False):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenProbability(msgspec.Struct, kw_only=True, gc=False):
    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopProbability]


class Timings(msgspec.Struct, kw_only=True):
    cache_n: int
    """Tokens of the prompt that were in the prefix cache."""
    prompt_n: int
    """Those that were computed."""
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Answer(msgspec.Struct, kw_only=True):
    """A whole answer, or a part of one."""

    index: int
    """Of the prompt."""
    content: str
    tokens: list[int] = []
    """With ``return_tokens``, and in parts."""
    id_slot: int = -1
    stop: bool
    """Whether it is whole, or the last part."""
    model: str | UnsetType = UNSET
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    """``eos``, ``limit`` or ``word``."""
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


def timings_of(output: RequestOutput) -> Timings:
    times, predicted = output.times, len(output.outputs[0].token_ids)
    first, last = times.first_token or times.arrived, times.last_token or times.arrived
    computed = len(output.prompt_token_ids) - output.num_cached_tokens
    prompt_ms = max(first - times.arrived - times.queued, 0.0) * MILLISECONDS
    predicted_ms = (last - first) * MILLISECONDS
    return Timings(
        cache_n=output.num_cached_tokens,
        prompt_n=computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, computed),
        prompt_per_second=_ratio(computed * MILLISECONDS, prompt_ms),
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, predicted),
        predicted_per_second=_ratio(predicted * MILLISECONDS, predicted_ms),
    )


def stop_of(completion: CompletionOutput) -> tuple[str, str]:
    """``stop_type`` and ``stopping_word`` of a finished sequence."""
    if completion.finish_reason != "stop":
        return "limit", ""
    return ("word", completion.stop_reason) if isinstance(completion.stop_reason, str) else ("eos", "")


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
