"""Requests and responses of Text Generation Inference. A stream has one event per token.

A null field of a request counts as absent. As in TGI, a response omits absent ``top_tokens``, and a full response omits
absent ``details``; all other absent fields are null.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.frontend.outputs import CompletionOutput
from penstock.serve.http.body import Reading, RequestBody
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.status import STATUS

MAX_TOP_TOKENS = 5
"""Default of TGI's option ``max_top_n_tokens``."""
ERROR_TYPES = {
    Code.INVALID: "validation",
    Code.UNSUPPORTED: "validation",
    Code.TOO_LARGE: "validation",
    Code.TOO_LONG: "validation",
    Code.OVERLOADED: "overloaded",
}
STATUSES = {Code.INVALID: 422, Code.UNSUPPORTED: 422, Code.TOO_LONG: 422, Code.OVERLOADED: 429}
"""HTTP statuses that differ from the statuses of other dialects."""


class TGIErrorFormat(ErrorFormat):
    dialect = "tgi"
    stream_start = b"data:"

    def document(self, failure: Failure) -> object:
        return {"error": failure.message, "error_type": ERROR_TYPES.get(failure.code, "generation")}

    def status(self, failure: Failure) -> int:
        return STATUSES.get(failure.code, STATUS[failure.code])


ERROR_FORMAT = TGIErrorFormat(
    {
        "max_tokens": "max_new_tokens",
        "truncate_prompt_tokens": "truncate",
        "logprobs": "top_n_tokens",
        "prompt": "inputs",
    }
)


class Grammar(msgspec.Struct, kw_only=True):
    """A constraint on the output (guided decoding)."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]
    """JSON Schema (``json``), object with a JSON Schema as ``schema`` (``json_schema``), or regular expression."""


class Parameters(msgspec.Struct, kw_only=True):
    adapter_id: str | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of sequences to generate; the most likely sequence is returned. Default: 1."""
    decoder_input_details: bool | None = None
    """Also return the prompt tokens, with log probabilities."""
    details: bool | None = None
    """Return the generated tokens with log probabilities."""
    do_sample: bool | None = None
    """Sample instead of greedy decoding. Default: true if temperature, top_k or top_p requests sampling."""
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Maximum number of generated tokens. Default: 100."""
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    """Return the prompt before the output."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: list[str] | None = None
    """Stop strings. The output includes the stop string that ended generation."""
    temperature: Annotated[float, msgspec.Meta(gt=0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_n_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_TOKENS)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    truncate: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Maximum number of prompt tokens; longer prompts are truncated at the beginning. Default: no truncation."""
    typical_p: float | None = None
    watermark: bool | None = None


class GenerateRequest(RequestBody, kw_only=True):
    reading: ClassVar = Reading(lax="", drops_null=True)

    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class CompatGenerateRequest(GenerateRequest, kw_only=True):
    """Generate request to the path ``/``."""

    stream: bool = False


class PromptToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    logprob: float | None
    """Log probability; None for the first token of the prompt."""


class Token(msgspec.Struct, kw_only=True, gc=False):
    id: int
    text: str
    logprob: float
    special: bool


class EndDetails(msgspec.Struct, kw_only=True):
    """Details of the end of generation."""

    finish_reason: str
    """Reason of the end: ``length``, ``eos_token`` or ``stop_sequence``."""
    generated_tokens: int
    seed: int | None


class Details(EndDetails, kw_only=True):
    prefill: list[PromptToken]
    """Prompt tokens, with ``decoder_input_details``."""
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class StreamDetails(EndDetails, kw_only=True):
    input_length: int
    """Number of prompt tokens."""


class Generation(msgspec.Struct, kw_only=True):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamToken(msgspec.Struct, kw_only=True):
    """An event of a stream: one generated token."""

    index: int
    """Index of the generated token, from 1."""
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    """The full output in the last event, otherwise None."""
    details: StreamDetails | None = None
    """Details of the end of generation, in the last event."""


def reason_of(completion: CompletionOutput) -> str:
    if completion.finish_reason != "stop":
        return "length"
    return "stop_sequence" if isinstance(completion.stop_reason, str) else "eos_token"
