"""vLLM's ``/generate``: a prompt with sampling parameters, answered with the prompt and its continuations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core import Code, Failure, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.frontend.outputs import RequestOutput
from penstock.frontend.prompts import TokenizedPrompt

from ...chat.prompt import truncate
from ...chat.request import GenerationRequest
from ...chat.sampling import sampling_of
from ...generation import generate
from ...http.access import Access
from ...http.body import read_object
from ...http.error_format import ErrorFormat
from ...http.openapi import operation, reference
from ...http.reply import Reply
from ...http.request_record import RequestRecord, record_of
from ...http.routes import Routes
from ...models.served_models import ServedModels
from ...models.service import ModelService
from ..openai.parse import parse
from ..openai.responses import ErrorResponse, encode, error_of

PATH = "/generate"
FULL_RATE_BYTES = 2**24
"""Bytes of a stream up to which it has an object for each step: each repeats the prompt and all texts."""
MIN_GROWTH = 17 / 16
"""By how much an object is larger than the one before it from then on."""
IGNORED = ("logprobs", "prompt_logprobs")
"""Fields that vLLM accepts and does not answer."""


class GenerateRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """A prompt, and the fields of vLLM's ``SamplingParams``."""

    prompt: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """16 by default."""


class GenerateResponse(msgspec.Struct):
    """An answer, or a chunk of its stream."""

    text: list[str]
    """Prompt and output of each sequence, all that there is so far."""


SCHEMAS = (GenerateRequest, GenerateResponse)


class GenerateErrorFormat(ErrorFormat):
    """OpenAI's errors in a stream of JSON objects, not server-sent events.

    Args:
        end: terminator of each object.
    """

    dialect = "vllm"

    def __init__(self, end: bytes) -> None:
        self.end = end

    def error(self, failure: Failure) -> bytes:
        return encode(error_of(failure))

    def stream_error(self, failure: Failure) -> bytes:
        return self.error(failure) + self.end


NEWLINE_DELIMITED = GenerateErrorFormat(b"\n")
NUL_DELIMITED = GenerateErrorFormat(b"\0")
"""Chunks end with a zero byte, as in vLLM up to 0.6."""


def is_ascend(served_models: ServedModels) -> bool:
    """Whether the profile is vLLM 0.5 for Ascend."""
    return served_models.options.compat == "ascend-vllm"


def check(sampling: SamplingParams) -> None:
    """Raises ``PenstockError`` (``invalid``) for ``n`` > 1 with greedy sampling, as vLLM 0.5 does."""
    if sampling.n > 1 and not sampling.use_beam_search and (sampling.greedy or sampling.top_k == 1):
        raise invalid("n", "must be 1 where temperature is 0 or top_k is 1, as all would be the same", 1)


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add ``/generate``."""
    routes.describe(SCHEMAS)
    error_format = NUL_DELIMITED if is_ascend(served_models) else NEWLINE_DELIMITED
    routes.error_formats.add(error_format, PATH)

    async def create(raw_request: Request) -> Response:
        record = record_of(raw_request.scope)
        record.error_format = error_format
        return await served_models.read(raw_request, lambda body: answer(body, record))

    def answer(body: bytes, record: RequestRecord) -> Response:
        fields = {name: value for name, value in read_object(body).items() if name not in IGNORED}
        request = parse(fields, GenerateRequest, record.unknown)
        if request.return_token_ids:
            raise PenstockError(Code.UNSUPPORTED, "return_token_ids: has no place in the answer", "return_token_ids")
        service = served_models.find(request.model)
        handler = GenerateHandler(service, record, request, error_format.end)
        return Reply.of(service, handler, error_format, request.stream)

    described = operation(reference(GenerateResponse), reference(ErrorResponse), reference(GenerateRequest))
    routes.add(
        PATH,
        create,
        access=Access.INFERENCE,
        method="POST",
        summary="Continue a prompt, in the form of vLLM's demonstration server",
        described=described,
    )


class GenerateHandler:
    """One request."""

    def __init__(self, service: ModelService, record: RequestRecord, request: GenerateRequest, end: bytes) -> None:
        self._service = service
        self._record = record
        self._request = request
        self._end = end
        self._adapter = service.adapter_of(request.model)
        max_tokens = request.max_tokens or service.gateway.input_processor.default_max_tokens
        self._sampling = sampling_of(request, SamplingParams(), max_tokens=max_tokens)
        check(self._sampling)

    async def full(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                last = output
        yield encode(self._response(last))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """All there is so far in each object. Beyond ``FULL_RATE_BYTES`` of them, one is sent only when there is so
        much more that the rest together remain a small multiple of the last one."""
        texts: list[str] = []
        sent = size = 0
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                new = [completion.text for completion in output.outputs]
                grown = sum(map(len, new)) + len(new) * len(self._request.prompt)
                if new == texts or (sent > FULL_RATE_BYTES and not output.finished and grown < size * MIN_GROWTH):
                    continue
                piece = encode(self._response(output)) + self._end
                yield piece
                texts, size, sent = new, grown, sent + len(piece)

    def _response(self, output: RequestOutput) -> GenerateResponse:
        return GenerateResponse([self._request.prompt + completion.text for completion in output.outputs])

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        request = self._request
        options = {"priority": request.priority or 0, "cache_salt": request.cache_salt or "", "adapter": self._adapter}
        gateway = self._service.gateway
        prompt = TokenizedPrompt(await gateway.encode(request.prompt), request.prompt)
        if request.truncate_prompt_tokens is not None:
            maximum = gateway.engine_pool.require_engine().max_model_len - (self._sampling.max_tokens or 1)
            prompt = TokenizedPrompt(truncate(prompt.token_ids, request, maximum))
        stream = generate(self._service, self._record, prompt, self._sampling, **options)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield output
