"""Base classes of embedding, score and classification requests and of their handlers."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, ClassVar

import msgspec

from penstock.core import PenstockError, PoolingParams
from penstock.core.errors import invalid
from penstock.frontend.input_processor import NO_GENERATION
from penstock.frontend.outputs import RequestOutput
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.chat.prompt import truncate
from penstock.serve.chat.request import PromptRequest
from penstock.serve.generation import GenerationHandler, Output, merge_streams
from penstock.serve.http.body import Reading, unsupported
from penstock.serve.http.reply import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel
from penstock.text.encoding import Texts

from .schema import Prompts

Input = str | list[int] | Texts


class PoolingRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """Fields of all embedding, score and classification requests. A null field counts as absent."""

    reading: ClassVar = Reading(
        unsupported=unsupported(
            {
                "additional_data": (),
                "embed_dtype": ("float32",),
                "endianness": ("native", "little"),
                "instruction": ("",),
                "max_tokens_per_doc": (0,),
                "max_tokens_per_query": (0,),
                "messages": (),
                "mm_processor_kwargs": ({},),
            }
        )
    )

    model: str | None = None
    """Name of a served model or adapter; absent or "default": the first model."""
    add_special_tokens: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Scheduling priority; lower values run first. Has an effect with the scheduling policy ``priority``."""
    cache_salt: str | None = None
    """Cached prefixes are shared only between requests with the same salt."""
    user: str | None = None
    use_activation: bool | None = None
    """Return classes and scores as probabilities, and normalize embeddings. Default: from the checkpoint."""


class InputRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    input: Prompts


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class PoolingHandler(GenerationHandler, ABC):
    """Base class of handlers that compute one vector, or one per token, for each prompt."""

    kind = ""
    """Prefix of response ids."""
    field = "input"
    """Name of the request's field with the prompts, for errors."""
    pooling: PoolingParams
    _prompts: Sequence[Input] = ()

    def __init__(self, service: ServedModel, record: RequestRecord, request: PoolingRequest) -> None:
        super().__init__(service, record, request, NO_GENERATION)
        self._request = request
        self._special = request.add_special_tokens is not False
        self._pooler = service.gateway.input_processor.pooler
        self.id = f"{self.kind}-{record.request_id}"
        self._created = int(time.time())

    async def prompts(self) -> list[tuple[str, Input]]:
        """The prompts, each with the name of its request field (for errors)."""
        return [(self.field, prompt) for prompt in self._prompts]

    @abstractmethod
    def response(self, outputs: list[RequestOutput]) -> object:
        """Make the response from the finished outputs, which are in the order of the prompts."""

    def answer(self, schema: Callable[..., object], data: Sequence[object], outputs: list[RequestOutput]) -> object:
        """Make a response of the class ``schema`` with the results ``data``."""
        return schema(id=self.id, created=self._created, model=self.model, data=data, usage=usage(outputs))

    async def outputs(self) -> AsyncGenerator[Output, None]:
        prompts = await self.prompts()
        size = sum(len(prompt) for _, prompt in prompts if isinstance(prompt, str | Texts))
        return merge_streams([self._vector(i, field, prompt, size) for i, (field, prompt) in enumerate(prompts)])

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        return await asyncio.to_thread(lambda: encode(self.response(outputs)))  # encoding many long vectors is slow

    def _classifier(self) -> PoolingParams:
        """Pooling parameters for classification and scoring, from the checkpoint and the request."""
        return self._pooler.classifier_params(PoolingParams(use_activation=self._request.use_activation))

    async def _vector(self, index: int, field: str, prompt: Input, size: int) -> AsyncGenerator[Output, None]:
        """Compute one prompt; yields its outputs. ``size`` is the total number of characters of all prompts."""
        try:
            if isinstance(prompt, str):
                prompt = Texts(prompt, add_special_tokens=self._special)
            if isinstance(prompt, Texts):
                tokenized = await self.service.gateway.encode_texts(self._with_limit(prompt), size)
            else:
                tokenized = truncate(TokenizedPrompt(prompt), self._request, self.max_model_len, "right")
            async with aclosing(self.generate(tokenized, index, pooling=self.pooling)) as outputs:
                async for output in outputs:
                    yield output
        except PenstockError as error:
            failure = error.failure
            if failure.field != "prompt":
                raise
            message = failure.message.removeprefix("prompt: ")
            raise PenstockError(failure.code, f"{field}: {message}", field, failure.limit, failure.value) from error

    def _with_limit(self, texts: Texts) -> Texts:
        """Add the token limit of the request (``truncate_prompt_tokens``) to a prompt."""
        limit = self._request.truncate_prompt_tokens
        if limit is None:
            return texts
        if limit == 0:
            raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 for the context length, is 0", 1)
        side = self._request.truncation_side or "right"
        return msgspec.structs.replace(texts, max_len=self.max_model_len if limit == -1 else limit, side=side)


def usage(outputs: Sequence[RequestOutput]) -> EmbeddingUsage:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
