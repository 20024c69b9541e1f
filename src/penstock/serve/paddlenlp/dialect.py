"""Which requests are PaddleNLP's, and how they are taken."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from penstock.serve.record import record_of
from penstock.serve.reply import Reply
from penstock.serve.service import Service
from penstock.serve.shared import Dialect

from .answering import Answering
from .answers import PaddleNLPShape
from .schema import OWN, names_of, parse

NAME = "paddlenlp"
"""Of the profile."""
OF_OPENAI = ("model", "prompt")
"""Of these, what OpenAI's clients send has one, and under the profile nothing else is told apart."""


class PaddleNLP(Dialect):
    """Spoken where a request has a field that only PaddleNLP has."""

    shape = PaddleNLPShape()

    def __init__(self, service: Service) -> None:
        self._service = service
        self._preferred = service.options.compat == NAME

    def speaks(self, request: HttpRequest, found: dict[str, Any]) -> bool:
        if not OWN.isdisjoint(found):
            return True
        return self._preferred and not any(name in found for name in OF_OPENAI)

    def completion(self, request: HttpRequest, found: dict[str, Any], size: int) -> Response:
        record, named = record_of(request.scope), found.get("req_id")
        shape = record.shape = PaddleNLPShape(named if isinstance(named, str) else "", names_of(found))
        wanted = parse(found)
        answering = Answering(self._service, record, wanted, size)
        streamed = bool(wanted.stream)
        return Reply(self._service, answering.stream() if streamed else answering.whole(), shape, streamed)

    chat = completion
