"""What PaddleNLP's clients get: objects of JSON, one a line where they are streamed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core import Failure
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.status import STATUS

encode = msgspec.json.Encoder().encode

LIMITS = {"max_prompt_len": "MAX_SEQ_LEN", "max_output_len": "MAX_DEC_LEN"}
"""Settings that errors tell of, as here and as PaddleNLP calls them."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    """With the one that ends the answer."""
    total_tokens: int


class Piece(msgspec.Struct, kw_only=True):
    """What a step brought."""

    req_id: str
    token: str
    """Text, of one token or several."""
    token_ids: list[int]
    """Without the one that ends the answer."""
    send_idx: int
    """Counts the pieces from 0."""
    is_end: int
    """1 in the last one."""
    error_msg: str = ""
    error_code: int = 0
    usage: Usage | UnsetType = UNSET
    """In the last one, where it is asked for."""


class Whole(msgspec.Struct, kw_only=True):
    """An answer that is not streamed."""

    req_id: str
    tokens_all: str
    """The text."""
    result: str
    """The same; PaddleNLP's document has the first name, its server the second."""
    is_end: int = 1
    error_msg: str = ""
    error_code: int = 0
    usage: Usage | UnsetType = UNSET


class ErrorAnswer(msgspec.Struct, kw_only=True):
    req_id: str
    error_msg: str
    error_code: int
    """HTTP's number for it, which is not the response's."""


def line(answer: msgspec.Struct) -> bytes:
    return encode(answer) + b"\n"


class PaddleNLPErrorFormat(ErrorFormat):
    """How a request is told that it failed.

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
        """As there: PaddleNLP's clients look at ``error_code``, and may take another status for a broken server."""
        return 200

    def answer(self, failure: Failure) -> ErrorAnswer:
        """The same before it is bytes."""
        words = rename_field(failure, self._names).message
        for setting, theirs in LIMITS.items():
            words = words.replace(f"{setting} (", f"{theirs} (")
        return ErrorAnswer(req_id=self._req_id, error_msg=words, error_code=STATUS[failure.code])
