"""Requests and answers of Text Generation Inference: documents, and an event for each token.

A field of a request that is null is taken as absent. The server leaves out ``top_tokens`` and a document's ``details``
where there are none; its other fields are null then.
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
"""As its option ``max_top_n_tokens`` is by default."""
ERROR_TYPES = {
    Code.INVALID: "validation",
    Code.UNSUPPORTED: "validation",
    Code.TOO_LARGE: "validation",
    Code.TOO_LONG: "validation",
    Code.OVERLOADED: "overloaded",
}
STATUSES = {Code.INVALID: 422, Code.UNSUPPORTED: 422, Code.TOO_LONG: 422, Code.OVERLOADED: 429}
"""Its own; others are those of all dialects."""


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
    """A constraint on the answer."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]
    """A JSON Schema, an object with one as ``schema``, or a regular expression."""


class Parameters(msgspec.Struct, kw_only=True):
    adapter_id: str | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Sequences to generate, of which the likeliest is returned."""
    decoder_input_details: bool | None = None
    """Return the prompt's tokens, too."""
    details: bool | None = None
    """Return tokens with log probabilities."""
    do_sample: bool | None = None
    """Otherwise greedy, unless one of the parameters of sampling is given."""
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """100 by default."""
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    """Return the prompt before the answer."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: list[str] | None = None
    """Strings that end the answer, which ends with the one that did."""
    temperature: Annotated[float, msgspec.Meta(gt=0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_n_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_TOKENS)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    truncate: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens of the prompt's end that are read."""
    typical_p: float | None = None
    watermark: bool | None = None


class GenerateRequest(RequestBody, kw_only=True):
    reading: ClassVar = Reading(lax="", drops_null=True)

    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class CompatGenerateRequest(GenerateRequest, kw_only=True):
    """Of ``/``."""

    stream: bool = False


class PromptToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    logprob: float | None
    """None of the first."""


class Token(msgspec.Struct, kw_only=True, gc=False):
    id: int
    text: str
    logprob: float
    special: bool


class EndDetails(msgspec.Struct, kw_only=True):
    """How an answer has ended."""

    finish_reason: str
    """``length``, ``eos_token`` or ``stop_sequence``."""
    generated_tokens: int
    seed: int | None


class Details(EndDetails, kw_only=True):
    prefill: list[PromptToken]
    """With ``decoder_input_details``."""
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class StreamDetails(EndDetails, kw_only=True):
    input_length: int
    """Tokens of the prompt."""


class Generation(msgspec.Struct, kw_only=True):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamToken(msgspec.Struct, kw_only=True):
    """An event."""

    index: int
    """1 for the first token."""
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    """The whole answer, with the last token."""
    details: StreamDetails | None = None
    """With the last token."""


def reason_of(completion: CompletionOutput) -> str:
    if completion.finish_reason != "stop":
        return "length"
    return "stop_sequence" if isinstance(completion.stop_reason, str) else "eos_token"
