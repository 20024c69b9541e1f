"""Which requests are PaddleNLP's, and how they are taken."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from penstock.serve.record import record_of
from penstock.serve.reply import Reply
from penstock.serve.services import Services
from penstock.serve.shared import Dialect

from .answering import Answering
from .answers import PaddleNLPShape
from .schema import OWN, names_of, parse

NAME = "paddlenlp"
"""Of the profile."""


class PaddleNLP(Dialect):
    """Spoken where a request has a field that only PaddleNLP has; under its profile also where it names no model, which
    OpenAI's clients do. It has no ``prompt``: a request with one is OpenAI's, whatever else is wrong with it."""

    shape = PaddleNLPShape()

    def __init__(self, services: Services) -> None:
        self._services = services
        self._preferred = services.options.compat == NAME

    def speaks(self, request: HttpRequest, found: dict[str, Any]) -> bool:
        own = not OWN.isdisjoint(found) or (self._preferred and "model" not in found)
        return own and "prompt" not in found

    def completion(self, request: HttpRequest, found: dict[str, Any], size: int) -> Response:
        record, named = record_of(request.scope), found.get("req_id")
        shape = record.shape = PaddleNLPShape(named if isinstance(named, str) else "", names_of(found))
        wanted = parse(found)
        service = self._services.find_or_first(wanted.model)
        answering = Answering(service, record, wanted, size)
        streamed = bool(wanted.stream)
        return Reply(service, answering.stream() if streamed else answering.whole(), shape, streamed)

    chat = completion
