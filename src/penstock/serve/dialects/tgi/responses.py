"""Answers of Text Generation Inference: documents, and an event for each token.

It leaves out ``top_tokens`` and a document's ``details`` where there are none; its other fields are null then.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.frontend.outputs import CompletionOutput
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.status import STATUS

encode = msgspec.json.Encoder().encode

ERROR_TYPES = {
    Code.INVALID: "validation",
    Code.UNSUPPORTED: "validation",
    Code.TOO_LARGE: "validation",
    Code.TOO_LONG: "validation",
    Code.OVERLOADED: "overloaded",
}
STATUSES = {Code.INVALID: 422, Code.UNSUPPORTED: 422, Code.TOO_LONG: 422, Code.OVERLOADED: 429}
"""Its own; others are those of all dialects."""
FIELD_NAMES = {
    "max_tokens": "max_new_tokens",
    "truncate_prompt_tokens": "truncate",
    "logprobs": "top_n_tokens",
    "prompt": "inputs",
}


class TGIErrorFormat(ErrorFormat):
    dialect = "tgi"

    def error(self, failure: Failure) -> bytes:
        message = rename_field(failure, FIELD_NAMES).message
        return encode({"error": message, "error_type": ERROR_TYPES.get(failure.code, "generation")})

    def stream_error(self, failure: Failure) -> bytes:
        return b"data:" + self.error(failure) + b"\n\n"

    def status(self, failure: Failure) -> int:
        return STATUSES.get(failure.code, STATUS[failure.code])


ERROR_FORMAT = TGIErrorFormat()


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


class Details(msgspec.Struct, kw_only=True):
    finish_reason: str
    """``length``, ``eos_token`` or ``stop_sequence``."""
    generated_tokens: int
    seed: int | None
    prefill: list[PromptToken]
    """With ``decoder_input_details``."""
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class StreamDetails(msgspec.Struct, kw_only=True):
    finish_reason: str
    generated_tokens: int
    seed: int | None
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
