"""llama-server's requests and responses. A null field of a request counts as absent."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.chat.request import Message, TokenId, Tool
from penstock.serve.http.body import Reading, RequestBody, unsupported
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.status import STATUS

WITHOUT_EFFECT = frozenset(
    "cache_prompt id_slot n_keep n_discard n_cache_reuse n_indent min_keep repeat_last_n samplers parse_special "
    "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat_tau mirostat_eta xtc_threshold "
    "dynatemp_exponent t_max_prompt_ms embd_normalize".split()
)
"""Ignored fields: settings of the model (set when the server starts), and parameters of unsupported samplers (requests
that enable such a sampler are rejected)."""
UNSUPPORTED = unsupported(
    {
        "mirostat": (0,),
        "typical_p": (1,),
        "dynatemp_range": (0,),
        "xtc_probability": (0,),
        "dry_multiplier": (0,),
        "top_n_sigma": (-1,),
        "t_max_predict_ms": (-1, 0),
        "lora": ([],),
        "image_data": ([],),
        "response_fields": ([],),
        "post_sampling_probs": (False,),
        "return_progress": (False,),
    },
    "is not supported",
)
"""Unsupported field → values that have no effect and are accepted."""
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
MILLISECONDS = 1000


class LlamaServerErrorFormat(ErrorFormat):
    dialect = "llama-server"

    def document(self, failure: Failure) -> object:
        error: dict[str, Any] = {
            "code": STATUS[failure.code],
            "message": failure.message,
            "type": ERROR_TYPES.get(failure.code, "server_error"),
        }
        if failure.code is Code.TOO_LONG:
            error |= {"n_prompt_tokens": failure.value, "n_ctx": failure.limit}
        return {"error": error}


ERROR_FORMAT = LlamaServerErrorFormat(
    {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
)


class LlamaRequest(RequestBody, kw_only=True):
    """Base class of all llama-server requests."""

    reading: ClassVar = Reading("numbers", UNSUPPORTED, WITHOUT_EFFECT, drops_null=True)


Mixed = list[str | TokenId]
"""A prompt that mixes texts and token ids."""
PromptField = str | Annotated[list[str | TokenId | Mixed], msgspec.Meta(min_length=1)]
"""A text, a list of token ids and texts (one prompt), or a list of several such prompts."""


class GenerationRequest(LlamaRequest, kw_only=True):
    """Fields of completion and infill requests."""

    model: str | None = None
    """Name of a served model. Default: the first model."""
    stream: bool | None = None
    n_predict: Annotated[int, msgspec.Meta(ge=-2)] | None = None
    """Maximum number of tokens; -1 (default) and -2: as many as fit in the context; 0: only process the prompt."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float | bool] | list[tuple[TokenId | str, float | bool]] | None = None
    """Bias by token id, or by text (applied to each of its tokens); false forbids the tokens."""
    n_probs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of most likely tokens to return with each token."""
    grammar: str | None = None
    """Grammar in GBNF."""
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: PromptField


class InfillFile(msgspec.Struct, kw_only=True):
    text: str
    filename: str = "tmp"


class InfillRequest(GenerationRequest, kw_only=True):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InfillFile] = msgspec.field(default_factory=list)
    """Other files of the repository, put before the prefix."""
    prompt: str = ""
    """Text with which the infilled code begins."""


class EmbeddingRequest(LlamaRequest, kw_only=True):
    content: PromptField
    model: str | None = None


class TemplateRequest(LlamaRequest, kw_only=True):
    messages: list[Message]
    model: str | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(LlamaRequest, kw_only=True):
    content: str
    model: str | None = None
    add_special: bool | None = None
    """Add the tokenizer's special tokens. Default: false."""
    with_pieces: bool | None = None
    """Also return the text of each token, or its bytes if they are not valid UTF-8."""


class TopProbability(msgspec.Struct, kw_only=True, gc=False):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenProbability(TopProbability, kw_only=True, gc=False):
    top_logprobs: list[TopProbability]


class Timings(msgspec.Struct, kw_only=True):
    cache_n: int
    """Number of prompt tokens found in the prefix cache."""
    prompt_n: int
    """Number of prompt tokens computed."""
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Answer(msgspec.Struct, kw_only=True):
    """A full completion response, or one event of a stream."""

    index: int
    """Index of the prompt in the request."""
    content: str
    tokens: list[int] = []
    """Generated token ids; in full responses only with ``return_tokens``."""
    id_slot: int = -1
    stop: bool
    """True in a full response and in the last event."""
    model: str | UnsetType = UNSET
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    """Reason of the end: ``eos``, ``limit`` (maximum number of tokens) or ``word`` (stop string)."""
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
