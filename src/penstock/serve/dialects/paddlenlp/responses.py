"""PaddleNLP's responses: JSON objects, one per line in a stream."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Code, Failure
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.status import STATUS

encode = msgspec.json.Encoder().encode

LIMIT_NAMES = {"max_prompt_len": "MAX_SEQ_LEN", "max_output_len": "MAX_DEC_LEN"}
"""Options in error messages → PaddleNLP's names."""


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


def line(answer: msgspec.Struct) -> bytes:
    return encode(answer) + b"\n"


class PaddleNLPErrorFormat(ErrorFormat):
    """PaddleNLP's error format.

    Args:
        names: its fields, by the names under which the engine knows them.
    """

    dialect = "paddlenlp"

    def __init__(self, req_id: str = "", names: Mapping[str, str] | None = None) -> None:
        self._req_id = req_id
        self._names = names or {}

    def error(self, failure: Failure) -> bytes:
        return line(self.answer(failure))

    stream_error = error

    def status(self, failure: Failure) -> int:
        """200, as in PaddleNLP: its clients read ``error_code``. Paths that are not served keep their status."""
        return STATUS[failure.code] if failure.code in (Code.NOT_FOUND, Code.NOT_ALLOWED) else 200

    def answer(self, failure: Failure) -> ErrorResponse:
        """The error as a struct."""
        message = rename_field(failure, self._names).message
        for setting, theirs in LIMIT_NAMES.items():
            message = message.replace(f"{setting} (", f"{theirs} (")
        return ErrorResponse(req_id=self._req_id, error_msg=message, error_code=STATUS[failure.code])
