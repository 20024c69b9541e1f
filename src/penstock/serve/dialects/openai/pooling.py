"""What requests for embeddings, scores and classes share: prompts to vectors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import cast

import msgspec

from penstock.core import PenstockError, PoolingParams
from penstock.core.errors import invalid
from penstock.frontend.input_processor import NO_GENERATION
from penstock.frontend.outputs import RequestOutput
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.chat.prompt import truncate
from penstock.serve.generation import generate, merge_streams
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService
from penstock.text.encoding import Texts

from .requests import MAX_PROMPTS, PoolingRequest
from .responses import EmbeddingUsage, encode

Input = str | list[int] | Texts


class PoolingHandler:
    """Base of the handlers: computes one vector per prompt."""

    kind = ""

    def __init__(self, service: ModelService, record: RequestRecord, request: PoolingRequest) -> None:
        self._service = service
        self._record = record
        self._request = request
        self._options = {
            "priority": request.priority or 0,
            "cache_salt": request.cache_salt or "",
            "adapter": service.adapter_of(request.model),
        }
        self._special = request.add_special_tokens is not False
        self._pooler = service.gateway.input_processor.pooler
        self.id = f"{self.kind}-{record.request_id}"
        self._model = str(self._options["adapter"]) or service.name
        self._created = int(time.time())

    def _classifier(self) -> PoolingParams:
        """Parameters of classes and scores, by the checkpoint and the request."""
        return self._pooler.classifier_params(PoolingParams(use_activation=self._request.use_activation))

    async def _answer(
        self,
        prompts: Sequence[tuple[str, Input]],
        pooling: PoolingParams,
        response: Callable[[list[RequestOutput]], object],
    ) -> bytes:
        """The encoded response to the finished outputs, in the order of ``prompts``: field name (for errors) and
        prompt."""
        size = sum(len(prompt) for _, prompt in prompts if isinstance(prompt, str | Texts))
        streams = [self._vector(field, prompt, size, pooling) for field, prompt in prompts]
        found: dict[int, RequestOutput] = {}
        async with aclosing(merge_streams(streams)) as outputs:
            async for index, output in outputs:
                found[index] = output
        ordered = [found[index] for index in range(len(prompts))]
        return await asyncio.to_thread(lambda: encode(response(ordered)))  # as long as there are many numbers

    async def _vector(
        self, field: str, prompt: Input, size: int, pooling: PoolingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output stream of one prompt; ``size`` is the number of characters of all prompts together."""
        try:
            if isinstance(prompt, str):
                prompt = Texts(prompt, add_special_tokens=self._special)
            if isinstance(prompt, Texts):
                tokenized = await self._service.gateway.encode_texts(self._limited(prompt), size)
            else:
                tokenized = TokenizedPrompt(truncate(prompt, self._request, self._max_len, "right"))
            stream = generate(self._service, self._record, tokenized, NO_GENERATION, pooling=pooling, **self._options)
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield output
        except PenstockError as error:
            failure = error.failure
            if failure.field != "prompt":
                raise
            message = failure.message.removeprefix("prompt: ")
            raise PenstockError(failure.code, f"{field}: {message}", field, failure.limit, failure.value) from error

    @property
    def _max_len(self) -> int:
        return self._service.gateway.engine_pool.require_engine().max_model_len

    def _limited(self, texts: Texts) -> Texts:
        """Texts with the request's ``truncate_prompt_tokens``."""
        limit = self._request.truncate_prompt_tokens
        if limit is None:
            return texts
        if limit == 0:
            raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 for what there is room for", 1)
        side = self._request.truncation_side or "right"
        return msgspec.structs.replace(texts, max_len=self._max_len if limit == -1 else limit, side=side)


def usage(outputs: Sequence[RequestOutput]) -> EmbeddingUsage:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)


def inputs(given: str | Sequence[str | int | list[int]]) -> list[str] | list[list[int]]:
    """One or several: texts, or lists of token ids.

    Raises ``PenstockError`` (``invalid``) where these are mixed.
    """
    if isinstance(given, str):
        return [given]
    if len({type(entry) for entry in given}) > 1:
        raise invalid("input", "mixes texts, token ids and lists of token ids")
    if isinstance(given[0], int):
        return [cast(list[int], given)]
    if len(given) > MAX_PROMPTS:
        raise invalid("input", f"holds {len(given)} inputs, and at most {MAX_PROMPTS} are taken", MAX_PROMPTS)
    return cast(list[str], given)
