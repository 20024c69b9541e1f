"""OpenAI's batch format: one request per input line, and one result (a response as over HTTP) per output line."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.core import Code, PenstockError
from penstock.serve.chat.request import ChatRequest, GenerationRequest
from penstock.serve.generation import GenerationHandler
from penstock.serve.http.body import check_elements, convert, read_object
from penstock.serve.http.error_format import rename_field
from penstock.serve.http.reply import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.status import STATUS
from penstock.serve.http.unexpected import unexpected
from penstock.serve.models.served_models import ServedModel

from .chat import ChatHandler
from .completions import CompletionHandler
from .embeddings import EmbeddingHandler, EmbeddingRequest
from .schema import CHAT_FIELD_NAMES, FIELD_NAMES, CompletionRequest, error_of

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request: one line of an input file."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    """Id that the client gives to the request; unique in the file."""
    method: Literal["POST"]
    url: str
    body: msgspec.Raw
    """JSON of the request; parsed when the line is processed."""


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Error of a line that is not a valid request."""

    code: str
    message: str
    line: int
    """Line number, from 1."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a line: a response, which may be an error response, or the error of an invalid line."""

    id: str
    custom_id: str | None
    """Id given by the client; None for an invalid line."""
    response: BatchResponse | None
    error: BatchError | None


async def answer(service: ServedModel, record: RequestRecord, url: str, body: bytes) -> tuple[int, bytes]:
    """Process a request without streaming. Failures are returned as error responses.

    Args:
        record: receives the token counts, or the failure.
        url: path of the endpoint.

    Returns:
        HTTP status and body of the response.
    """
    try:
        handler = await service.parser.parse(record.sender, len(body), lambda: _handler(service, record, url, body))
        return 200, await handler.format_full(await handler.finished())
    except PenstockError as error:
        record.failure = error.failure
    except Exception as error:
        record.failure = unexpected(error, record.request_id)
    names = CHAT_FIELD_NAMES if url == CHAT else FIELD_NAMES
    return STATUS[record.failure.code], encode(error_of(rename_field(record.failure, names)))


def _handler(service: ServedModel, record: RequestRecord, url: str, body: bytes) -> GenerationHandler:
    check_elements(body)
    if url == CHAT:
        chat = convert(read_object(body), ChatRequest, record.unknown)
        _refuse_stream(chat)
        return ChatHandler(service, record, chat, len(body))
    if url == COMPLETIONS:
        request = convert(read_object(body), CompletionRequest, record.unknown)
        _refuse_stream(request)
        return CompletionHandler(service, record, request)
    if url == EMBEDDINGS:
        texts = convert(read_object(body), EmbeddingRequest, record.unknown)
        return EmbeddingHandler(service, record, texts)
    known = ", ".join((CHAT, COMPLETIONS, EMBEDDINGS))
    raise PenstockError(Code.NOT_FOUND, f"url: {url[:100]!r} does not support batches; use one of {known}", "url")


def _refuse_stream(request: GenerationRequest) -> None:
    if request.stream:
        raise PenstockError(Code.UNSUPPORTED, "stream: is not supported in batches; leave it out", "stream")
