"""``/v1/embeddings``, and vLLM's ``/pooling``: texts as vectors."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator

from penstock.core import PoolingParams
from penstock.frontend.outputs import RequestOutput, embedding_of, vectors_of
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService

from .pooling import PoolingHandler, inputs, usage
from .requests import EmbeddingRequest, PoolRequest
from .responses import Embedding, EmbeddingResponse, Pooled, PoolResponse


class EmbeddingHandler(PoolingHandler):
    kind = "embd"

    def __init__(self, service: ModelService, record: RequestRecord, request: EmbeddingRequest) -> None:
        super().__init__(service, record, request)
        self._as_text = request.encoding_format == "base64"
        pooler, name = self._pooler, request.prompt_name
        self._prompts = [
            pooler.with_prompt(prompt, name) if isinstance(prompt, str) else prompt for prompt in inputs(request.input)
        ]
        self._pooling = pooler.embedding_params(_wanted(request))

    async def full(self) -> AsyncGenerator[bytes, None]:
        yield await self._answer([("input", prompt) for prompt in self._prompts], self._pooling, self._response)

    def _response(self, outputs: list[RequestOutput]) -> EmbeddingResponse:
        return EmbeddingResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            data=[Embedding(index=i, embedding=self._encode_embedding(output)) for i, output in enumerate(outputs)],
            usage=usage(outputs),
        )

    def _encode_embedding(self, output: RequestOutput) -> list[float] | str:
        if self._as_text:
            return base64.b64encode(output.embedding or b"").decode()
        return embedding_of(output)


class PoolHandler(PoolingHandler):
    """Vectors of any task, a list of numbers each, or for tasks of tokens a list for each token."""

    kind = "pool"

    def __init__(self, service: ModelService, record: RequestRecord, request: PoolRequest) -> None:
        super().__init__(service, record, request)
        self._as_text = request.encoding_format == "base64"
        self._prompts = inputs(request.input)
        wanted = _wanted(request)
        self._pooling = self._pooler.params(request.task, wanted)

    async def full(self) -> AsyncGenerator[bytes, None]:
        yield await self._answer([("input", prompt) for prompt in self._prompts], self._pooling, self._response)

    def _response(self, outputs: list[RequestOutput]) -> PoolResponse:
        return PoolResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            data=[Pooled(index=i, data=self._data(output)) for i, output in enumerate(outputs)],
            usage=usage(outputs),
        )

    def _data(self, output: RequestOutput) -> list[float | list[float]] | str:
        if self._as_text:
            return base64.b64encode(output.embedding or b"").decode()
        return [*vectors_of(output)] if self._pooling.pooling_type == "all" else [*embedding_of(output)]


def _wanted(request: EmbeddingRequest | PoolRequest) -> PoolingParams:
    """What a request asks for. ``use_activation`` of an embedding is whether it has length 1."""
    normalize = request.use_activation if request.normalize is None else request.normalize
    return PoolingParams(dimensions=request.dimensions, normalize=normalize, use_activation=request.use_activation)
