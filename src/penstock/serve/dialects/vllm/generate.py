"""vLLM's ``/generate``: completes a prompt with sampling parameters; each returned text begins with the prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from penstock.core import Code, Failure, FinishReason, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.frontend.outputs import RequestOutput
from penstock.frontend.prompts import TokenizedPrompt

from ...chat.prompt import truncate
from ...chat.request import UNSUPPORTED, GenerationRequest
from ...chat.sampling import sampling_of
from ...generation import GenerationHandler, Output
from ...http.body import Reading
from ...http.error_format import ErrorFormat
from ...http.reply import Reply, encode
from ...http.request_record import RequestRecord
from ...http.routes import Routes
from ...models.served_models import ServedModel, ServedModels
from ..endpoints import DialectRoutes
from ..openai.schema import ErrorResponse, error_of

PATH = "/generate"
FULL_RATE_BYTES = 2**24
"""Bytes of a stream up to which an object is sent for each step. Each object repeats the prompt and all text so far."""
MIN_GROWTH = 17 / 16
"""Minimum ratio of the size of an object to the size of the previous object, beyond ``FULL_RATE_BYTES``."""
IGNORED = frozenset(("logprobs", "prompt_logprobs"))
"""Fields without effect: vLLM's ``/generate`` accepts them, but returns no log probabilities."""


class GenerateRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """A prompt, and the fields of vLLM's ``SamplingParams``."""

    reading: ClassVar = Reading(unsupported=UNSUPPORTED, ignored=IGNORED)

    prompt: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Maximum number of generated tokens. Default: 16."""


class GenerateResponse(msgspec.Struct):
    """A full response, or one object of a stream."""

    text: list[str]
    """Prompt followed by the output so far, for each sequence."""
    finish_reason: list[str | None] | UnsetType = UNSET
    """Reason for each sequence; set in the last object if a sequence was cut off by the limit of tokens (vLLM has no
    such field)."""


class GenerateErrorFormat(ErrorFormat):
    """OpenAI's error format, for streams of JSON objects instead of server-sent events.

    Args:
        end: terminator of each object of a stream.
    """

    dialect = "vllm"
    stream_start = b""

    def __init__(self, end: bytes) -> None:
        super().__init__()
        self.stream_end = end

    def document(self, failure: Failure) -> object:
        return error_of(failure)


NEWLINE_DELIMITED = GenerateErrorFormat(b"\n")
NUL_DELIMITED = GenerateErrorFormat(b"\0")
"""Error format of streams with objects that end with a NUL byte, as in vLLM up to 0.6."""


def is_ascend(served_models: ServedModels) -> bool:
    """True with ``--compat ascend-vllm`` (vLLM 0.5 for Ascend)."""
    return served_models.options.compat == "ascend-vllm"


def check(sampling: SamplingParams) -> None:
    """Raise ``PenstockError`` (``invalid``) for ``n`` > 1 with greedy sampling, as vLLM 0.5 does."""
    if sampling.n > 1 and not sampling.use_beam_search and (sampling.greedy or sampling.top_k == 1):
        message = f"must be 1 with temperature 0 or top_k 1 (all sequences would be the same), is {sampling.n}"
        raise invalid("n", message, 1)


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add vLLM's ``/generate``."""
    error_format = NUL_DELIMITED if is_ascend(served_models) else NEWLINE_DELIMITED
    routes.error_formats.add(error_format, PATH)
    api = DialectRoutes(routes, served_models, error_format, (GenerateRequest, GenerateResponse), failure=ErrorResponse)

    def create(request: GenerateRequest, record: RequestRecord, size: int) -> Response:
        if request.return_token_ids:
            message = "return_token_ids: the response of /generate has no field for token ids; use /v1/completions"
            raise PenstockError(Code.UNSUPPORTED, message, "return_token_ids")
        service = served_models.find(request.model)
        handler = GenerateHandler(service, record, request, error_format.stream_end)
        return Reply.of(service, handler, error_format, request.stream)

    summary = "Complete a prompt, in the format of vLLM's demo API server"
    api.post(PATH, api.endpoint(GenerateRequest, create), summary, GenerateRequest, answer=GenerateResponse)


class GenerateHandler(GenerationHandler):
    """Handler of one generate request.

    Args:
        end: terminator of each object of a stream.
    """

    def __init__(self, service: ServedModel, record: RequestRecord, request: GenerateRequest, end: bytes) -> None:
        max_tokens = request.max_tokens or service.gateway.input_processor.default_max_tokens
        super().__init__(service, record, request, sampling_of(request, SamplingParams(), max_tokens=max_tokens))
        self._request = request
        self._end = end
        self._texts: list[str] = []
        """Outputs in the last object sent, without the prompt."""
        self._size = self._sent = 0
        """Number of characters in the last object, and number of bytes sent so far."""
        check(self.sampling)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        request = self._request
        prompt = TokenizedPrompt(await self.service.gateway.encode(request.prompt), request.prompt)
        if request.truncate_prompt_tokens is not None:
            maximum = self.max_model_len - (self.sampling.max_tokens or 1)
            prompt = truncate(TokenizedPrompt(prompt.token_ids), request, maximum)
        return self.generate(prompt)

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        return encode(self._response(outputs[0]))

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        """Encode an object with all text so far. Beyond ``FULL_RATE_BYTES``, it is sent only if it has grown by a
        factor of ``MIN_GROWTH``, so that a stream is at most a small multiple of the size of its last object."""
        texts = [completion.text for completion in output.outputs]
        size = sum(map(len, texts)) + len(texts) * len(self._request.prompt)
        is_slowed = self._sent > FULL_RATE_BYTES and not output.finished
        is_cut = output.finished and _is_cut(output)
        if (texts == self._texts and not is_cut) or (is_slowed and size < self._size * MIN_GROWTH):
            return b""
        chunk = encode(self._response(output)) + self._end
        self._texts, self._size, self._sent = texts, size, self._sent + len(chunk)
        return chunk

    def _response(self, output: RequestOutput) -> GenerateResponse:
        answer = GenerateResponse([self._request.prompt + completion.text for completion in output.outputs])
        if output.finished and _is_cut(output):
            answer.finish_reason = [completion.finish_reason for completion in output.outputs]
        return answer


def _is_cut(output: RequestOutput) -> bool:
    """True if a sequence was cut off by the limit of tokens."""
    return any(completion.finish_reason == FinishReason.LENGTH for completion in output.outputs)
