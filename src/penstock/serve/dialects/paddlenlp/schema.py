"""PaddleNLP's requests and responses: JSON objects, one per line in a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

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
"""Server option in error messages → name of the option in PaddleNLP."""
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Request(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """A generation request. A null field counts as absent."""

    req_id: Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]{1,256}$(?!\n)")] | None = None
    """Request id chosen by the client. The request is refused while another request with this id is open."""
    model: str | None = None
    """Name of a LoRA adapter; any other name selects the served model."""
    text: NonEmptyText | None = None
    """One user turn. It is rendered with the chat template if there is one and ``template_text`` is set, otherwise used
    unmodified. A request has exactly one of text, messages and input_ids."""
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    input_ids: TokenIds | None = None
    system: str | None = None
    """System message, put before all messages."""

    max_dec_len: Length | None = None
    """Maximum number of output tokens. Default: as many as fit in the context, at most MAX_DEC_LEN."""
    seq_len: Length | None = None
    max_tokens: Length | None = None
    """``seq_len`` and ``max_tokens`` are other names of ``max_dec_len``."""
    min_dec_len: Length | None = None
    """Minimum number of output tokens. Default: 1."""
    topp: Share | None = None
    """Cumulative probability of the sampled tokens (top-p). Default: 0.7; 0: greedy."""
    top_p: Share | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    """Sampling temperature. Default: 0.95; 0: greedy."""
    penalty_score: Annotated[float, msgspec.Meta(gt=0)] | None = None
    frequency_score: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    presence_score: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    eos_token_ids: TokenId | Annotated[list[TokenId], msgspec.Meta(max_length=1)] | None = None
    """A token that ends generation, in addition to the model's EOS tokens."""
    infer_seed: Seed | None = None
    seed: Seed | None = None

    stream: bool | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Maximum seconds until the next chunk of a stream, or until a full response. Default: 300 until the next token."""
    response_timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Name of ``timeout`` in PaddleNLP's gRPC client."""
    return_usage: bool | None = None
    return_all_tokens: bool | None = None
    """Stream the whole output in one chunk."""


PADDLENLP_FIELDS = frozenset(Request.__struct_fields__).difference(
    CompletionRequest.__struct_fields__, ChatRequest.__struct_fields__
)
"""PaddleNLP's fields that OpenAI's completion and chat requests do not have."""
SELECTING_FIELDS = PADDLENLP_FIELDS.difference(
    ("text", "input_ids", "system", "timeout", "response_timeout", "eos_token_ids", "return_usage")
)
"""Fields that select PaddleNLP's dialect even if the request has ``messages``."""
FIELD_ALIASES = {
    "max_dec_len": ("max_dec_len", "seq_len", "max_tokens"),
    "topp": ("topp", "top_p"),
    "infer_seed": ("infer_seed", "seed"),
    "timeout": ("timeout", "response_timeout"),
}
"""Field → all names of the field; a request may use one of the names."""
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
"""Internal field name → field name in PaddleNLP, for errors."""
DEFAULT_TIMEOUT = 300.0
"""Default of ``timeout``, seconds."""


def parse(fields: dict[str, Any], unknown: UnknownFields) -> Request:
    """Convert the JSON object of a request.

    Args:
        unknown: collects unknown fields.

    Raises ``PenstockError`` (``invalid``) for wrong types, values out of range, contradictory fields, and unknown
    fields if ``unknown`` is strict.
    """
    request = convert(fields, Request, unknown)
    given = [name for name in PROMPTS if getattr(request, name) is not None]
    if not given:
        raise invalid("text", "is missing; give text, messages or input_ids")
    if len(given) > 1:
        raise invalid(given[1], f"cannot be combined with {given[0]}; give only one of {', '.join(PROMPTS)}")
    for names in FIELD_ALIASES.values():
        given = [name for name in names if getattr(request, name) is not None]
        if len(given) > 1:
            raise invalid(given[1], f"is another name of {given[0]}; give only one of them")
    return request


def field_value(request: Request, name: str) -> Any:
    """The value of a field under any of its names; None if it is absent."""
    values = [getattr(request, same) for same in FIELD_ALIASES.get(name, (name,))]
    return next((value for value in values if value is not None), None)


def sampling_of(request: Request) -> SamplingParams:
    """The sampling parameters, with PaddleNLP's defaults instead of the checkpoint's ``generation_config.json``."""

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
    """Internal field name → field name in the request, for errors."""
    names = {}
    for internal, name in FIELD_NAMES.items():
        if internal not in fields:
            names[internal] = next((each for each in FIELD_ALIASES.get(name, ()) if fields.get(each) is not None), name)
    if "prompt" not in fields:
        names["prompt"] = next((name for name in PROMPTS if name in fields), PROMPTS[0])
    return names


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    """Number of output tokens, including the stop token."""
    total_tokens: int


class StreamChunk(msgspec.Struct, kw_only=True):
    """One line of a stream."""

    req_id: str
    token: str
    """New text, of one or several tokens."""
    token_ids: list[int]
    """Ids of the new tokens, without the stop token."""
    send_idx: int
    """Index of the chunk, from 0."""
    is_end: int
    """1 in the last chunk, otherwise 0."""
    finish_reason: Literal["length"] | UnsetType = UNSET
    """Set in the last chunk if the answer was cut off by the limit of tokens (PaddleNLP has no such field)."""
    error_msg: str = ""
    error_code: int = 0
    usage: Usage | UnsetType = UNSET
    """Set in the last chunk, with ``return_usage``."""


class FullResponse(msgspec.Struct, kw_only=True):
    """A response that is not streamed."""

    req_id: str
    tokens_all: str
    """Generated text."""
    result: str
    """Same as ``tokens_all``. PaddleNLP documents ``tokens_all``, but its server sends ``result``."""
    is_end: int = 1
    finish_reason: Literal["length"] | UnsetType = UNSET
    """As in ``StreamChunk``."""
    error_msg: str = ""
    error_code: int = 0
    usage: Usage | UnsetType = UNSET


class ErrorResponse(msgspec.Struct, kw_only=True):
    req_id: str
    error_msg: str
    error_code: int
    """HTTP status that describes the error; the response itself has the status 200."""


class PaddleNLPErrorFormat(ErrorFormat):
    """PaddleNLP's error format.

    Args:
        req_id: request id chosen by the client.
        names: internal field name → field name in the request.
    """

    dialect = "paddlenlp"

    def __init__(self, req_id: str = "", names: Mapping[str, str] | None = None) -> None:
        super().__init__(names)
        self._req_id = req_id

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Make the error format of a request from its JSON object."""
        req_id = fields.get("req_id")
        return cls(req_id if isinstance(req_id, str) else "", field_names(fields))

    def document(self, failure: Failure) -> ErrorResponse:
        message = failure.message
        for option, name in LIMIT_NAMES.items():
            message = message.replace(f"{option} (", f"{name} (")
        return ErrorResponse(req_id=self._req_id, error_msg=message, error_code=STATUS[failure.code])

    def error(self, failure: Failure) -> bytes:
        return super().error(failure) + b"\n"

    stream_error = error

    def status(self, failure: Failure) -> int:
        """HTTP status of an error: 200 (PaddleNLP's clients read ``error_code``), or 404 and 405 for unknown routes."""
        return STATUS[failure.code] if failure.code in (Code.NOT_FOUND, Code.NOT_ALLOWED) else 200
