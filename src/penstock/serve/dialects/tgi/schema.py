"""Requests and responses of Text Generation Inference. A stream has one event per token.

Null fields of a request are dropped. TGI omits an absent ``top_tokens``, and the ``details`` of an unstreamed response;
other absent fields are null.
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
"""HTTP statuses that differ from those of the other dialects."""


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
    """A constraint on the output."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]
    """A JSON Schema, an object with one as ``schema``, or a regular expression."""


class Parameters(msgspec.Struct, kw_only=True):
    adapter_id: str | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of sequences to generate; the most likely one is returned."""
    decoder_input_details: bool | None = None
    """Return the prompt tokens, too."""
    details: bool | None = None
    """Return the tokens with log probabilities."""
    do_sample: bool | None = None
    """Sample. Default: greedy, unless temperature, top_k or top_p asks for sampling."""
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Default: 100."""
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    """Return the prompt before the output."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: list[str] | None = None
    """Stop strings. The output includes the stop string that ended it."""
    temperature: Annotated[float, msgspec.Meta(gt=0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_n_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_TOKENS)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    truncate: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Keep only this many tokens at the end of the prompt."""
    typical_p: float | None = None
    watermark: bool | None = None


class GenerateRequest(RequestBody, kw_only=True):
    reading: ClassVar = Reading(lax="", drops_null=True)

    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class CompatGenerateRequest(GenerateRequest, kw_only=True):
    """Request to ``/``."""

    stream: bool = False


class PromptToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    logprob: float | None
    """None for the first token."""


class Token(msgspec.Struct, kw_only=True, gc=False):
    id: int
    text: str
    logprob: float
    special: bool


class EndDetails(msgspec.Struct, kw_only=True):
    """How generation ended."""

    finish_reason: str
    """``length``, ``eos_token`` or ``stop_sequence``."""
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
    """An event of a stream."""

    index: int
    """Index of the token, from 1."""
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    """The full output, in the last event."""
    details: StreamDetails | None = None
    """Set in the last event."""


def reason_of(completion: CompletionOutput) -> str:
    if completion.finish_reason != "stop":
        return "length"
    return "stop_sequence" if isinstance(completion.stop_reason, str) else "eos_token"
