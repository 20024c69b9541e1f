"""Generation through the gateway: metrics, the request log, concurrent prompts, and the base class of handlers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, NamedTuple, Protocol

from penstock.core import FinishReason, PenstockError, SamplingParams
from penstock.core.errors import CANCELLED
from penstock.frontend.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from penstock.frontend.prompts import TokenizedPrompt

from .http.request_record import RequestRecord
from .models.served_models import ServedModel
from .spans import GenerationSpan

MAX_CONCURRENT_PROMPTS = 64
"""Maximum number of prompts of one request in the engine at a time, so that one request cannot fill the queue."""
Output = tuple[int, RequestOutput]
"""Index of a prompt in its request, and the prompt's output so far."""


async def generate(
    service: ServedModel,
    record: RequestRecord,
    prompt: TokenizedPrompt,
    sampling: SamplingParams,
    index: int = 0,
    **options: Any,
) -> AsyncGenerator[Output, None]:
    """Generate from one prompt. Yields the output so far after every step, or only once with ``disable_streaming``.

    Updates the metrics and the request's record.

    Args:
        index: index of the prompt in its request.
        options: arguments of ``Gateway.generate``. The shorter of ``timeout`` and the server's timeout applies.
            ``arrived`` is by default the time when the request arrived.

    Raises ``PenstockError`` if the request fails, before the first output or later.
    """
    service.metrics.record_arrival(sampling)
    record.log_fields["model"] = service.name
    record.num_truncated += prompt.num_truncated
    if adapter := options.get("adapter"):
        record.log_fields["adapter"] = adapter
    if record.tenant and not service.options.share_prefix_cache:
        options["cache_salt"] = f"{record.tenant} {options.get('cache_salt', '')}"
    arrived = options.pop("arrived", record.arrived)
    timeouts = (options.pop("timeout", None), service.timeout)
    timeout = min([each for each in timeouts if each is not None], default=None)
    span = None
    if record.span and record.span.sampled:
        span = GenerationSpan(record.span, arrived, service.name, record.request_id, sampling)
    trace = (span.context if span else record.span.context) if record.span else None
    stream = service.gateway.generate(
        prompt,
        sampling,
        record.request_id,
        timeout=timeout,
        arrived=arrived,
        tenant=record.tenant,
        trace=trace,
        **options,
    )
    metrics, counted, last = service.metrics, 0, None
    final_only = service.options.disable_streaming
    num_resumes = 0
    with span or nullcontext(), metrics.tokens:
        async with aclosing(stream) as outputs:
            async for output in outputs:
                record.weights_version = record.weights_version or output.weights_version
                record.outputs[index] = output
                if output.lowered_tools:
                    levels = {name: "off" if name == "*" else "function" for name in output.lowered_tools}
                    record.tool_levels = levels | record.tool_levels
                while num_resumes < len(output.resumes) and output.resumes[num_resumes].continued:
                    resume = output.resumes[num_resumes]
                    num_resumes += 1
                    if resume.changed_engine:
                        record.changed_engines[resume.changed_engine] = None
                    metrics.record_resume(resume)
                    if span:
                        span.resume(resume)
                for completion in output.outputs:
                    if completion.failure or completion.finish_reason == FinishReason.CANCELLED:
                        raise PenstockError.of(completion.failure or CANCELLED)
                if output.embedding:
                    metrics.record_first_token(output)
                tokens = sum([len(completion.token_ids) for completion in output.outputs]) + output.num_discarded_tokens
                if tokens > counted:
                    if not counted:
                        metrics.record_first_token(output)
                    now = output.times.last_token
                    metrics.tokens.add(tokens - counted, now - last if now and last else None, len(output.outputs))
                    counted, last = tokens, now
                if output.finished:
                    metrics.record_finish(output)
                    record.add_output(output)
                    if span:
                        span.finish(output)
                if output.finished or not final_only:
                    yield index, output


def merge_streams(streams: Sequence[AsyncGenerator[Output, None]]) -> AsyncGenerator[Output, None]:
    """Merge the outputs of several streams in order of arrival. The first failure ends all streams."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[Output, None]]) -> AsyncGenerator[Output, None]:
    queue: asyncio.Queue[Output | Exception | None] = asyncio.Queue(MAX_CONCURRENT_PROMPTS)
    window = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

    async def pump(stream: AsyncGenerator[Output, None]) -> None:
        try:
            async with window, aclosing(stream) as outputs:
                async for output in outputs:
                    await queue.put(output)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            new = await queue.get()
            if isinstance(new, Exception):
                raise new
            if new is None:
                left -= 1
            else:
                yield new
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class GenerationFields(Protocol):
    """Fields of all generation requests."""

    @property
    def model(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...


class GenerationHandler(ABC):
    """Base class of handlers of one generation request: runs the loop over outputs. Subclasses format the outputs."""

    def __init__(
        self, service: ServedModel, record: RequestRecord, request: GenerationFields, sampling: SamplingParams
    ) -> None:
        self.service = service
        self.record = record
        self.sampling = sampling
        adapter = service.adapter_of(request.model)
        self.model = adapter or service.name
        """Name of the model or adapter used."""
        self._options = {
            "priority": request.priority or 0,
            "cache_salt": request.cache_salt or "",
            "adapter": adapter,
        }
        self.last: dict[int, RequestOutput] = {}
        """Latest output of each prompt, by the prompt's index."""

    @abstractmethod
    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Prepare the prompts and return the stream of their outputs."""

    @abstractmethod
    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        """Format the answer as one document, from the finished outputs of all prompts."""

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        """Format the events for the new part of a prompt's output. Not used by requests that cannot stream."""
        return b""

    def format_end(self) -> bytes:
        """Format the events after the last step."""
        return b""

    async def full(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as one document."""
        yield await self.format_full(await self.finished())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events."""
        async with aclosing(await self.outputs()) as outputs:
            async for index, output in outputs:
                self.last[index] = output
                if events := await self.format_chunk(index, output):
                    yield events
        if end := self.format_end():
            yield end

    async def finished(self) -> list[RequestOutput]:
        """Return the finished outputs, in the order of the prompts."""
        async with aclosing(await self.outputs()) as outputs:
            async for index, output in outputs:
                self.last[index] = output
        return [self.last[index] for index in sorted(self.last)]

    def generate(self, prompt: TokenizedPrompt, index: int = 0, **options: Any) -> AsyncGenerator[Output, None]:
        """Generate from one prompt; ``options`` as in the function ``generate``."""
        return generate(self.service, self.record, prompt, self.sampling, index, **self._options, **options)

    @property
    def max_model_len(self) -> int:
        """Context length in tokens. Raises ``PenstockError`` (``unavailable``) if no engine is ready."""
        return self.service.gateway.engine_pool.known_engine().max_model_len


def likeliest(position: PositionLogprobs, maximum: int) -> list[tuple[int, Logprob]]:
    """The ``maximum`` most likely tokens at a position, by rank."""
    return sorted([entry for entry in position.items() if entry[1].rank <= maximum], key=lambda entry: entry[1].rank)


class SequenceDelta(NamedTuple):
    """Text, tokens and logprobs added to a sequence."""

    text: str
    token_ids: list[int]
    positions: list[PositionLogprobs]


class SequenceCursor:
    """Tracks how much of a sequence has been sent."""

    __slots__ = ("finished", "positions", "text", "tokens")

    def __init__(self) -> None:
        self.text = self.tokens = self.positions = 0
        self.finished = False

    def advance(self, completion: CompletionOutput) -> SequenceDelta | None:
        """Return the part added since the last call; None: nothing was added."""
        if self.finished or (len(completion.token_ids) == self.tokens and not completion.finished):
            return None
        positions = completion.logprobs[self.positions :] if completion.logprobs else []
        delta = SequenceDelta(completion.text[self.text :], completion.token_ids[self.tokens :], positions)
        self.text, self.tokens, self.finished = len(completion.text), len(completion.token_ids), completion.finished
        self.positions += len(positions)
        return delta
