"""``/v1/embeddings``, and vLLM's ``/score``: texts as vectors, and how near they are."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

import msgspec

from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.frontend.gateway import MAX_INLINE_SIZE
from penstock.frontend.input_processor import NO_GENERATION, Prompt
from penstock.frontend.outputs import RequestOutput, cosine, embedding_of
from penstock.serve.chat.prompt import truncate
from penstock.serve.generation import generate, merge_streams
from penstock.serve.http.body import require
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService

from .requests import MAX_PROMPTS, TEXT_PAIRS, EmbeddingRequest, ScoreRequest
from .responses import Embedding, EmbeddingResponse, EmbeddingUsage, Score, ScoreResponse, encode


class _PoolingHandler:
    """Base of embeddings and scores: computes one vector per prompt."""

    kind = ""

    def __init__(self, service: ModelService, record: RequestRecord, request: EmbeddingRequest | ScoreRequest) -> None:
        self._service = service
        self._record = record
        self._request = request
        self._options = {
            "priority": request.priority or 0,
            "cache_salt": request.cache_salt or "",
            "adapter": service.adapter_of(request.model),
        }
        self._special = request.add_special_tokens is not False
        self._pooling = service.gateway.input_processor.pooling
        self.id = f"{self.kind}-{record.request_id}"
        self._model = str(self._options["adapter"]) or service.name
        self._created = int(time.time())

    async def _vectors(self, prompts: Sequence[tuple[str, Prompt]]) -> list[RequestOutput]:
        """The finished outputs, in the order of ``prompts``: field name (for errors) and prompt."""
        size = sum(len(prompt) for _, prompt in prompts if isinstance(prompt, str))
        streams = [self._vector(field, prompt, size) for field, prompt in prompts]
        result: dict[int, RequestOutput] = {}
        async with aclosing(merge_streams(streams)) as outputs:
            async for index, output in outputs:
                result[index] = output
        return [result[index] for index in range(len(prompts))]

    async def _vector(self, field: str, prompt: Prompt, size: int) -> AsyncGenerator[RequestOutput, None]:
        """The output stream of one prompt; ``size`` is the number of characters of all prompts together."""
        try:
            cut = self._request.truncate_prompt_tokens is not None
            if cut or (isinstance(prompt, str) and (not self._special or size > MAX_INLINE_SIZE)):
                token_ids = await self._service.gateway.encode(prompt, self._special, size)
                maximum = self._service.gateway.engine_pool.require_engine().max_model_len
                prompt = {"prompt_token_ids": truncate(token_ids, self._request, maximum, "right")}
            stream = generate(
                self._service, self._record, prompt, NO_GENERATION, pooling=self._pooling, **self._options
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield output
        except PenstockError as error:
            failure = error.failure
            if failure.field != "prompt":
                raise
            message = failure.message.removeprefix("prompt: ")
            raise PenstockError(failure.code, f"{field}: {message}", field, failure.limit, failure.value) from error


class EmbeddingHandler(_PoolingHandler):
    kind = "embd"

    def __init__(self, service: ModelService, record: RequestRecord, request: EmbeddingRequest) -> None:
        super().__init__(service, record, request)
        self._as_text = request.encoding_format == "base64"
        self._prompts = _inputs(request)
        if request.dimensions is not None:
            self._pooling = msgspec.structs.replace(self._pooling, dimensions=request.dimensions)
        if request.normalize is not None:
            self._pooling = msgspec.structs.replace(self._pooling, normalize=request.normalize)

    async def full(self) -> AsyncGenerator[bytes, None]:
        outputs = await self._vectors([("input", prompt) for prompt in self._prompts])
        yield await asyncio.to_thread(self._response, outputs)  # which takes as long as there are many numbers

    def _response(self, outputs: list[RequestOutput]) -> bytes:
        answer = EmbeddingResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            data=[Embedding(index=i, embedding=self._encode_embedding(output)) for i, output in enumerate(outputs)],
            usage=_usage(outputs),
        )
        return encode(answer)

    def _encode_embedding(self, output: RequestOutput) -> list[float] | str:
        if self._as_text:
            return base64.b64encode(output.embedding or b"").decode()
        return embedding_of(output)


class ScoreHandler(_PoolingHandler):
    kind = "score"

    def __init__(self, service: ModelService, record: RequestRecord, request: ScoreRequest) -> None:
        super().__init__(service, record, request)
        self._names = _text_fields(request)
        first, second = self._names
        self._first, self._second = (
            [text] if isinstance(text := require(getattr(request, name), name), str) else text for name in self._names
        )
        if len(self._first) not in (1, len(self._second)):
            message = f"{len(self._second)} texts for {len(self._first)} of {first}; give one, or as many"
            raise invalid(second, message, len(self._first))

    async def full(self) -> AsyncGenerator[bytes, None]:
        texts = dict(zip(self._names, (self._first, self._second), strict=True))
        outputs = await self._vectors([(field, text) for field, some in texts.items() for text in some])
        yield await asyncio.to_thread(self._response, outputs)

    def _response(self, outputs: list[RequestOutput]) -> bytes:
        vectors = [embedding_of(output) for output in outputs]
        before, after = vectors[: len(self._first)], vectors[len(self._first) :]
        if len(before) == 1:
            before = before * len(after)
        pairs = enumerate(zip(before, after, strict=True))
        answer = ScoreResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            data=[Score(index=i, score=cosine(a, b)) for i, (a, b) in pairs],
            usage=_usage(outputs),
        )
        return encode(answer)


def _text_fields(request: ScoreRequest) -> tuple[str, str]:
    """The names of both sides.

    Raises ``PenstockError`` (``invalid``) where there are more than two.
    """
    given_fields = {name for sides in TEXT_PAIRS for name in sides if getattr(request, name) is not None}
    result = next((sides for sides in TEXT_PAIRS if given_fields.issubset(sides)), None)
    if result is None:
        raise invalid(max(given_fields), "give text_1 and text_2, or queries and documents, and no others")
    return result


def _usage(outputs: Sequence[RequestOutput]) -> EmbeddingUsage:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)


def _inputs(request: EmbeddingRequest) -> list[Prompt]:
    """One or several: texts, or lists of token ids.

    Raises ``PenstockError`` (``invalid``) where these are mixed.
    """
    given = request.input
    if isinstance(given, str):
        return [given]
    if len({type(entry) for entry in given}) > 1:
        raise invalid("input", "mixes texts, token ids and lists of token ids")
    if isinstance(given[0], int):
        return [cast(list[int], given)]
    if len(given) > MAX_PROMPTS:
        raise invalid("input", f"holds {len(given)} inputs, and at most {MAX_PROMPTS} are taken", MAX_PROMPTS)
    return cast(list[Prompt], given)
