"""``/v1/embeddings``, and vLLM's ``/pooling``: texts as vectors."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import msgspec

from penstock.core import PoolingParams
from penstock.frontend.outputs import RequestOutput, embedding_of, vectors_of
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel

from .pooling import EmbeddingUsage, InputRequest, PoolingHandler
from .schema import one_or_several


class VectorRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """Fields of requests for vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or float32 in base64."""
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of leading elements of a vector to keep, before it is normalized."""
    normalize: bool | None = None
    """Whether vectors have length 1; by default as the checkpoint says."""


class EmbeddingRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    prompt_name: str | None = None
    """What texts begin with, of the checkpoint's prompts; by default as it says, and empty is nothing."""


class PoolRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None
    """Those of tokens give a vector for each token; by default what the checkpoint is for."""


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Pooled(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


class EmbeddingHandler(PoolingHandler):
    kind = "embd"

    def __init__(self, service: ServedModel, record: RequestRecord, request: EmbeddingRequest) -> None:
        super().__init__(service, record, request)
        self._as_text = request.encoding_format == "base64"
        self._prompts = [
            self._pooler.with_prompt(prompt, request.prompt_name) if isinstance(prompt, str) else prompt
            for prompt in one_or_several(request.input, "input", "inputs")
        ]
        self.pooling = self._pooler.embedding_params(_wanted(request))

    def response(self, outputs: list[RequestOutput]) -> object:
        vectors = [_base64(output) if self._as_text else embedding_of(output) for output in outputs]
        data = [Embedding(index=i, embedding=vector) for i, vector in enumerate(vectors)]
        return self.answer(EmbeddingResponse, data, outputs)


class PoolHandler(PoolingHandler):
    """Vectors of any task, a list of numbers each, or for tasks of tokens a list for each token."""

    kind = "pool"

    def __init__(self, service: ServedModel, record: RequestRecord, request: PoolRequest) -> None:
        super().__init__(service, record, request)
        self._as_text = request.encoding_format == "base64"
        self._prompts = one_or_several(request.input, "input", "inputs")
        self.pooling = self._pooler.params(request.task, _wanted(request))

    def response(self, outputs: list[RequestOutput]) -> object:
        data = [Pooled(index=i, data=self._data(output)) for i, output in enumerate(outputs)]
        return self.answer(PoolResponse, data, outputs)

    def _data(self, output: RequestOutput) -> list[float | list[float]] | str:
        if self._as_text:
            return _base64(output)
        return [*vectors_of(output)] if self.pooling.pooling_type == "all" else [*embedding_of(output)]


def _base64(output: RequestOutput) -> str:
    return base64.b64encode(output.embedding or b"").decode()


def _wanted(request: VectorRequest) -> PoolingParams:
    """What a request asks for. ``use_activation`` of an embedding is whether it has length 1."""
    normalize = request.use_activation if request.normalize is None else request.normalize
    return PoolingParams(dimensions=request.dimensions, normalize=normalize, use_activation=request.use_activation)
