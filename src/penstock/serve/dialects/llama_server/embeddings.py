"""``/embedding``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from penstock.frontend.outputs import RequestOutput, embedding_of
from penstock.serve.dialects.openai.embeddings import EmbeddingHandler


class LlamaServerEmbeddingHandler(EmbeddingHandler):
    """One request for vectors: each text has a list of one, that of the whole text."""

    async def full(self) -> AsyncGenerator[bytes, None]:
        yield await self._answer([("content", prompt) for prompt in self._prompts], self._pooling, _vectors)


def _vectors(outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    return [{"index": i, "embedding": [embedding_of(output)]} for i, output in enumerate(outputs)]
