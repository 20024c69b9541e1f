"""PaddleNLP's requests and answers: JSON objects, one per line in a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure, SamplingParams
from penstock.core.errors import invalid
from penstock.serve.chat.request import ChatRequest, Message, NonEmptyText, Seed, TokenId, TokenIds
from penstock.serve.dialects.openai.schema import CompletionRequest
from penstock.serve.http.body import RequestBody, convert
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.status import STATUS
from penstock.serve.http.unknown_fields import UnknownFields

LIMIT_NAMES = {"max_prompt_len": "MAX_SEQ_LEN", "max_output_len": "MAX_DEC_LEN"}
"""Options in error messages → PaddleNLP's names."""
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Request(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """A field that is null is taken as absent."""

    req_id: Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]{1,256}$(?!\n)")] | None = None
    """The client's id of the request; refused while another request with it is open."""
    model: str | None = None
    """An adapter; any other name is the model that is served."""
    text: NonEmptyText | None = None
    """One user turn, rendered by the chat template (or continued as it is: option ``template_text``, or a model without
    a template). A request has this, or messages, or input_ids."""
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    input_ids: TokenIds | None = None
    system: str | None = None
    """A system message before the others."""

    max_dec_len: Length | None = None
    """By default what is left of the context, at most MAX_DEC_LEN."""
    seq_len: Length | None = None
    max_tokens: Length | None = None
    """Other names of ``max_dec_len``."""
    min_dec_len: Length | None = None
    """1 by default."""
    topp: Share | None = None
    """0.7 by default; 0 is greedy."""
    top_p: Share | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    """0.95 by default; 0 is greedy."""
    penalty_score: Annotated[float, msgspec.Meta(gt=0)] | None = None
    frequency_score: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    presence_score: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    eos_token_ids: TokenId | Annotated[list[TokenId], msgspec.Meta(max_length=1)] | None = None
    """One token that ends the answer, besides the model's own."""
    infer_seed: Seed | None = None
    seed: Seed | None = None

    stream: bool | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds in which each piece of a stream must come, or all of an answer in one piece. By default 300 seconds in
    which another token must be made."""
    response_timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The name of ``timeout`` in PaddleNLP's gRPC client."""
    return_usage: bool | None = None
    return_all_tokens: bool | None = None
    """Stream all in one piece."""


PADDLENLP_FIELDS = frozenset(Request.__struct_fields__).difference(
    CompletionRequest.__struct_fields__, ChatRequest.__struct_fields__
)
"""Fields that OpenAI's requests do not have."""
SELECTING_FIELDS = PADDLENLP_FIELDS.difference(
    ("text", "input_ids", "system", "timeout", "response_timeout", "eos_token_ids", "return_usage")
)
"""Fields that select this dialect even where the request has ``messages``."""
FIELD_ALIASES = {
    "max_dec_len": ("max_dec_len", "seq_len", "max_tokens"),
    "topp": ("topp", "top_p"),
    "infer_seed": ("infer_seed", "seed"),
    "timeout": ("timeout", "response_timeout"),
}
"""Fields with several names, of which a request may use one."""
PROMPTS = ("text", "messages", "input_ids")
FIELD_NAMES = {
    "external_id": "req_id",
    "max_tokens": "max_dec_len",
    "min_tokens": "min_dec_len",
    "top_p": "topp",
    "repetition_penalty": "penalty_score",
    "frequency_penalty": "frequency_score",
    "presence_penalty": "presence_score",
    "seed": "infer_seed",
    "stop_token_ids": "eos_token_ids",
}
"""Internal field name → PaddleNLP's, for errors."""
DEFAULT_TIMEOUT = 300.0


def parse(fields: dict[str, Any], unknown: UnknownFields) -> Request:
    """A request from its JSON.

    Args:
        unknown: collects unknown fields.

    Raises ``PenstockError`` (``invalid``) for values of a wrong type or that are out of bounds, for what does not go
    together, and for unknown fields where requests are read strictly.
    """
    request = convert(fields, Request, unknown)
    given = [name for name in PROMPTS if getattr(request, name) is not None]
    if not given:
        raise invalid("text", "is missing; give text, messages or input_ids")
    if len(given) > 1:
        raise invalid(given[1], f"cannot be combined with {given[0]}")
    for names in FIELD_ALIASES.values():
        given = [name for name in names if getattr(request, name) is not None]
        if len(given) > 1:
            raise invalid(given[1], f"is {given[0]} by another name; give one of them")
    return request


def field_value(request: Request, name: str) -> Any:
    """The value of a field, given by any of its names."""
    values = [getattr(request, same) for same in FIELD_ALIASES.get(name, (name,))]
    return next((value for value in values if value is not None), None)


def sampling_of(request: Request) -> SamplingParams:
    """The sampling parameters, with PaddleNLP's defaults instead of the checkpoint's."""

    def value_or(name: str, default: Any) -> Any:
        value = field_value(request, name)
        return default if value is None else value

    temperature, topp, ends = value_or("temperature", 0.95), value_or("topp", 0.7), value_or("eos_token_ids", ())
    return SamplingParams(
        max_tokens=field_value(request, "max_dec_len"),
        min_tokens=value_or("min_dec_len", 1),
        temperature=temperature if topp else 0.0,
        top_p=topp or 1.0,
        repetition_penalty=value_or("penalty_score", 1.0),
        frequency_penalty=value_or("frequency_score", 0.0),
        presence_penalty=value_or("presence_score", 0.0),
        seed=field_value(request, "infer_seed"),
        stop_token_ids=(ends,) if isinstance(ends, int) else tuple(ends),
    )


def field_names(fields: dict[str, Any]) -> dict[str, str]:
    """Internal field name → the name that this request uses."""
    names = {}
    for ours, theirs in FIELD_NAMES.items():
        if ours not in fields:
            names[ours] = next((name for name in FIELD_ALIASES.get(theirs, ()) if fields.get(name) is not None), theirs)
    if "prompt" not in fields:
        names["prompt"] = next((name for name in PROMPTS if name in fields), PROMPTS[0])
    return names


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    """Stop token included."""
    total_tokens: int


class StreamChunk(msgspec.Struct, kw_only=True):
    """One line of a stream."""

    req_id: str
    token: str
    """Text, of one token or several."""
    token_ids: list[int]
    """Without the stop token."""
    send_idx: int
    """Index of the piece, from 0."""
    is_end: int
    """1 in the last one."""
    error_msg: str = ""
    error_code: int = 0
    usage: Usage | UnsetType = UNSET
    """In the last piece, with ``return_usage``."""


class FullResponse(msgspec.Struct, kw_only=True):
    """An answer that is not streamed."""

    req_id: str
    tokens_all: str
    """The text."""
    result: str
    """The text again: PaddleNLP's documentation has ``tokens_all``, its server sends ``result``."""
    is_end: int = 1
    error_msg: str = ""
    error_code: int = 0
    usage: Usage | UnsetType = UNSET


class ErrorResponse(msgspec.Struct, kw_only=True):
    req_id: str
    error_msg: str
    error_code: int
    """The HTTP status that would fit; the response's own is 200."""


class PaddleNLPErrorFormat(ErrorFormat):
    """PaddleNLP's error format.

    Args:
        req_id: the request's.
        names: its fields, by the names under which the engine knows them.
    """

    dialect = "paddlenlp"

    def __init__(self, req_id: str = "", names: Mapping[str, str] | None = None) -> None:
        super().__init__(names)
        self._req_id = req_id

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """The format for a request's JSON."""
        req_id = fields.get("req_id")
        return cls(req_id if isinstance(req_id, str) else "", field_names(fields))

    def document(self, failure: Failure) -> ErrorResponse:
        message = failure.message
        for setting, theirs in LIMIT_NAMES.items():
            message = message.replace(f"{setting} (", f"{theirs} (")
        return ErrorResponse(req_id=self._req_id, error_msg=message, error_code=STATUS[failure.code])

    def error(self, failure: Failure) -> bytes:
        return super().error(failure) + b"\n"

    stream_error = error

    def status(self, failure: Failure) -> int:
        """200, as in PaddleNLP: its clients read ``error_code``. Paths that are not served keep their status."""
        return STATUS[failure.code] if failure.code in (Code.NOT_FOUND, Code.NOT_ALLOWED) else 200
