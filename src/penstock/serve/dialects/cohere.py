"""Cohere's ``/v1/embed`` and ``/v2/embed``: float, int8 and binary embeddings. ``openai/scores.py`` has ``/rerank``."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from penstock.core import Failure, PoolingParams
from penstock.core.errors import invalid
from penstock.frontend.outputs import RequestOutput, embedding_of
from penstock.serve.http.body import Reading, RequestBody, Unsupported
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.reply import Reply
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.routes import Endpoint, Routes
from penstock.serve.models.served_models import ServedModel, ServedModels

from .endpoints import DialectRoutes
from .openai.pooling import Input, PoolingHandler, PoolingRequest
from .openai.schema import MAX_PROMPTS

PREFIX = "cohere."
"""Prefix of schema names in the OpenAPI document."""
PROMPT_NAMES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
"""``input_type`` → names of the checkpoint's prompt, tried in order. Any other ``input_type`` is the name itself."""
UNSUPPORTED = {"images": Unsupported("this endpoint embeds text only; send texts")}
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class EmbedContent(msgspec.Struct, kw_only=True):
    type: Literal["text", "image_url"]
    text: str | None = None


class EmbedInput(msgspec.Struct, kw_only=True):
    content: Annotated[list[EmbedContent], msgspec.Meta(min_length=1)]
    """Text parts, joined with newlines."""


class EmbedRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Embed request of version 1 or 2 of the API. A null field counts as absent."""

    reading: ClassVar = Reading(unsupported=UNSUPPORTED, drops_null=True)

    model: str | None = None
    texts: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    inputs: Annotated[list[EmbedInput], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    """Texts as lists of parts: an alternative to ``texts``."""
    input_type: str | None = None
    """Name of the checkpoint's prompt that is prepended to each text; None: the default prompt of the checkpoint."""
    embedding_types: Annotated[list[EmbeddingType], msgspec.Meta(min_length=1)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """Side from which texts beyond the token limit are truncated; NONE: reject such texts. Default: END."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Maximum number of tokens per text; longer texts are truncated."""
    output_dimension: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=999)] | None = None


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """A list of embeddings for each requested type."""

    floats: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class EmbedResponse(msgspec.Struct, kw_only=True):
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    id: str
    embeddings: CohereEmbeddings | list[list[float]]
    """A plain list of vectors in version 1 without ``embedding_types``; otherwise lists by type."""
    texts: list[str]
    meta: dict[str, Any]


SCHEMAS = (EmbedRequest, EmbedResponse)


class CohereErrorFormat(ErrorFormat):
    dialect = "cohere"

    def document(self, failure: Failure) -> object:
        return {"message": failure.message}


ERROR_FORMAT = CohereErrorFormat()


class EmbedHandler(PoolingHandler):
    kind = "embd"

    def __init__(self, service: ServedModel, record: RequestRecord, request: EmbedRequest, version: str) -> None:
        truncates = request.truncate != "NONE"
        if request.max_tokens and not truncates:
            raise invalid("max_tokens", "requires truncate START or END, not NONE")
        maximum = service.gateway.engine_pool.known_engine().max_model_len
        limit = min(request.max_tokens or maximum, maximum)
        shared = PoolingRequest(
            model=request.model,
            priority=request.priority,
            truncate_prompt_tokens=limit if truncates else None,
            truncation_side="left" if request.truncate == "START" else "right",
        )
        super().__init__(service, record, shared)
        self._version, self._types = version, request.embedding_types
        self._texts = _texts(request)
        input_type = request.input_type or ""
        names = PROMPT_NAMES.get(input_type, (input_type,))
        self._prompt = next((name for name in names if name in self._pooler.prompts), None)
        self._field = "inputs" if request.texts is None else "texts"
        self.pooling = self._pooler.embedding_params(PoolingParams(dimensions=request.output_dimension))

    async def prompts(self) -> list[tuple[str, Input]]:
        return [(self._field, self._pooler.with_prompt(text, self._prompt)) for text in self._texts]

    def response(self, outputs: list[RequestOutput]) -> EmbedResponse:
        vectors = [embedding_of(output) for output in outputs]
        by_type = self._types is not None or self._version == "2"
        types: Sequence[EmbeddingType] = self._types or ["float"]
        converted = {name: [CONVERSIONS[name](vector) for vector in vectors] for name in types}
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return EmbedResponse(
            response_type="embeddings_by_type" if by_type else "embeddings_floats",
            id=self.id,
            embeddings=msgspec.convert(converted, CohereEmbeddings) if by_type else vectors,
            texts=self._texts,
            meta={"api_version": {"version": self._version}, "billed_units": {"input_tokens": tokens}},
        )


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add ``/v1/embed`` and ``/v2/embed``."""
    routes.error_formats.add(ERROR_FORMAT, "/v1/embed", "/v2/embed")
    routes.error_formats.add(routes.error_formats.default, "/v1/embeddings")
    api = DialectRoutes(routes, served_models, ERROR_FORMAT, SCHEMAS, PREFIX)

    def embed(version: str) -> Endpoint:
        def endpoint(request: EmbedRequest, record: RequestRecord, size: int) -> Response:
            service = served_models.find(request.model)
            return Reply.of(service, EmbedHandler(service, record, request, version), ERROR_FORMAT, False)

        return api.endpoint(EmbedRequest, endpoint)

    for version in ("1", "2"):
        api.post(f"/v{version}/embed", embed(version), "Embed texts (Cohere)", EmbedRequest, answer=EmbedResponse)


def _texts(request: EmbedRequest) -> list[str]:
    """The texts to embed. Raises ``PenstockError`` (``invalid``) for images, or if not one of the two fields is set."""
    if (request.texts is None) == (request.inputs is None):
        found = "neither" if request.texts is None else "both"
        raise invalid("texts", f"give either texts or inputs; the request has {found}")
    if request.texts is not None:
        return request.texts
    parts = [each.content for each in request.inputs or ()]
    if any(part.text is None for content in parts for part in content):
        raise invalid("inputs", "has parts without text, but this endpoint embeds text only; send text parts")
    return ["\n".join(part.text or "" for part in content) for content in parts]


def _int8(vector: Sequence[float]) -> list[int]:
    """Scale a vector so that its largest absolute value is 127, and round. Keeps cosine similarities, not lengths."""
    scale = 127 / (max(map(abs, vector)) or 1.0)
    return [round(number * scale) for number in vector]


def _uint8(vector: Sequence[float]) -> list[int]:
    return [number + 128 for number in _int8(vector)]


def _ubinary(vector: Sequence[float]) -> list[int]:
    """Pack one bit per number (1: positive) into bytes, most significant bit first; the last byte is zero-padded."""
    bits = "".join("1" if number > 0 else "0" for number in vector)
    return [int(bits[first : first + 8].ljust(8, "0"), 2) for first in range(0, len(bits), 8)]


def _binary(vector: Sequence[float]) -> list[int]:
    return [byte - 128 for byte in _ubinary(vector)]


def _base64(vector: Sequence[float]) -> str:
    """Base64 of the vector as float32."""
    return base64.b64encode(array("f", vector).tobytes()).decode()


CONVERSIONS: dict[EmbeddingType, Callable[[Sequence[float]], Any]] = {
    "float": list,
    "int8": _int8,
    "uint8": _uint8,
    "binary": _binary,
    "ubinary": _ubinary,
    "base64": _base64,
}
