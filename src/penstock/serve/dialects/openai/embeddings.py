"""Requests, responses and handlers of OpenAI's ``/v1/embeddings`` and vLLM's ``/pooling``."""

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
    """Fields that embedding and pooling requests share."""

    encoding_format: Literal["float", "base64"] | None = None
    """Format of vectors: JSON numbers (default), or base64 of float32."""
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of leading dimensions to keep, before normalization."""
    normalize: bool | None = None
    """Normalize vectors to length 1. Default: from the checkpoint."""


class EmbeddingRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    prompt_name: str | None = None
    """Name of the checkpoint's prompt to prepend to texts. Default: the checkpoint's default; empty: no prompt."""


class PoolRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None
    """Pooling task. The ``token_`` tasks return a vector per token. Default: the task of the checkpoint."""


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
        self._as_base64 = request.encoding_format == "base64"
        self._prompts = [
            self._pooler.with_prompt(prompt, request.prompt_name) if isinstance(prompt, str) else prompt
            for prompt in one_or_several(request.input, "input", "inputs")
        ]
        self.pooling = self._pooler.embedding_params(_pooling_params(request))

    def response(self, outputs: list[RequestOutput]) -> object:
        vectors = [_base64(output) if self._as_base64 else embedding_of(output) for output in outputs]
        data = [Embedding(index=i, embedding=vector) for i, vector in enumerate(vectors)]
        return self.answer(EmbeddingResponse, data, outputs)


class PoolHandler(PoolingHandler):
    """Handler of a pooling request. The result of a text is a vector, or with a ``token_`` task one per token."""

    kind = "pool"

    def __init__(self, service: ServedModel, record: RequestRecord, request: PoolRequest) -> None:
        super().__init__(service, record, request)
        self._as_base64 = request.encoding_format == "base64"
        self._prompts = one_or_several(request.input, "input", "inputs")
        self.pooling = self._pooler.params(request.task, _pooling_params(request))

    def response(self, outputs: list[RequestOutput]) -> object:
        data = [Pooled(index=i, data=self._data(output)) for i, output in enumerate(outputs)]
        return self.answer(PoolResponse, data, outputs)

    def _data(self, output: RequestOutput) -> list[float | list[float]] | str:
        if self._as_base64:
            return _base64(output)
        return [*vectors_of(output)] if self.pooling.pooling_type == "all" else [*embedding_of(output)]


def _base64(output: RequestOutput) -> str:
    return base64.b64encode(output.embedding or b"").decode()


def _pooling_params(request: VectorRequest) -> PoolingParams:
    """The pooling parameters of a request. If ``normalize`` is absent, ``use_activation`` is used in its place."""
    normalize = request.use_activation if request.normalize is None else request.normalize
    return PoolingParams(dimensions=request.dimensions, normalize=normalize, use_activation=request.use_activation)
