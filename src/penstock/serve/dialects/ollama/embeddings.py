"""``/api/embed`` and ``/api/embeddings``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from penstock.frontend.outputs import RequestOutput, embedding_of
from penstock.serve.dialects.openai.embeddings import EmbeddingHandler
from penstock.serve.dialects.openai.requests import EmbeddingRequest
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService

from .requests import EmbeddingsRequest, EmbedRequest
from .responses import NANOSECONDS, Embeddings, OneEmbedding

WHOLE_CONTEXT = -1
"""Value of ``truncate_prompt_tokens``: what the model takes."""


def _texts(request: EmbedRequest | EmbeddingsRequest) -> str | list[str | int | list[int]]:
    if isinstance(request, EmbeddingsRequest):
        return request.prompt
    return request.input if isinstance(request.input, str) else [*request.input]


class OllamaEmbeddingHandler(EmbeddingHandler):
    """One request for vectors."""

    def __init__(
        self, service: ModelService, record: RequestRecord, request: EmbedRequest | EmbeddingsRequest, model: str
    ) -> None:
        is_list = isinstance(request, EmbedRequest)
        cut = request.truncate is not False if isinstance(request, EmbedRequest) else True
        converted = EmbeddingRequest(
            input=_texts(request),
            model=model,
            dimensions=request.dimensions if isinstance(request, EmbedRequest) else None,
            truncate_prompt_tokens=WHOLE_CONTEXT if cut else None,
        )
        super().__init__(service, record, converted)
        self._asked, self._is_list, self._started = request.model or model, is_list, time.monotonic()

    async def full(self) -> AsyncGenerator[bytes, None]:
        prompts = [("input" if self._is_list else "prompt", prompt) for prompt in self._prompts]
        yield await self._answer(prompts, self._pooling, self._vectors if self._is_list else self._vector_alone)

    def _vectors(self, outputs: list[RequestOutput]) -> Embeddings:
        return Embeddings(
            model=self._asked,
            embeddings=[embedding_of(output) for output in outputs],
            total_duration=int((time.monotonic() - self._started) * NANOSECONDS),
            prompt_eval_count=sum(len(output.prompt_token_ids) for output in outputs),
        )

    def _vector_alone(self, outputs: list[RequestOutput]) -> OneEmbedding:
        return OneEmbedding(embedding=embedding_of(outputs[0]))
