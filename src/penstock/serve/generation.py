"""Generation through the gateway: with metrics and the request log, several prompts at once, and as deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, NamedTuple

from penstock.core import Code, Failure, FinishReason, PenstockError, SamplingParams
from penstock.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from penstock.frontend.prompts import TokenizedPrompt

from .http.request_record import RequestRecord
from .models.service import ModelService
from .spans import GenerationSpan

MAX_CONCURRENT_PROMPTS = 64
"""Prompts of one request that are in the engine at the same time, so that no request fills the queue by itself."""
CANCELLED = Failure(Code.CANCELLED, "the request was cancelled")


async def generate(
    service: ModelService,
    record: RequestRecord,
    prompt: TokenizedPrompt,
    sampling: SamplingParams,
    **options: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """Generate from one prompt: the output so far after every step, or once with ``disable_streaming``.

    Updates the metrics and the request's record.

    Args:
        options: arguments of ``Gateway.generate``; the shorter of ``timeout`` and the server's applies.

    Raises ``PenstockError`` where the request fails, before the first output or later.
    """
    service.metrics.record_arrival(sampling)
    record.facts["model"] = service.name
    if adapter := options.get("adapter"):
        record.facts["adapter"] = adapter
    if record.tenant and not service.options.share_prefix_cache:
        options["cache_salt"] = f"{record.tenant} {options.get('cache_salt', '')}"
    given = (options.pop("timeout", None), service.timeout)
    timeout = min([each for each in given if each is not None], default=None)
    span = None
    if record.span and record.span.sampled:
        span = GenerationSpan(record.span, record.arrived, service.name, record.request_id, sampling)
    trace = (span.context if span else record.span.context) if record.span else None
    stream = service.gateway.generate(
        prompt,
        sampling,
        record.request_id,
        timeout=timeout,
        arrived=record.arrived,
        tenant=record.tenant,
        trace=trace,
        **options,
    )
    metrics, counted, last = service.metrics, 0, None
    final_only = service.options.disable_streaming
    with span or nullcontext(), metrics.tokens:
        async with aclosing(stream) as outputs:
            async for output in outputs:
                record.weights_version = record.weights_version or output.weights_version
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
                    yield output


async def merge_streams(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several streams as they come, each with the index of its stream. The first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(MAX_CONCURRENT_PROMPTS)
    window = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with window, aclosing(stream) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, new = await queue.get()
            if isinstance(new, Exception):
                raise new
            if new is None:
                left -= 1
            else:
                yield index, new
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SequenceDelta(NamedTuple):
    """What was added to a sequence."""

    text: str
    token_ids: list[int]
    positions: list[PositionLogprobs]


class SequenceCursor:
    """The position in a sequence up to which it has been sent."""

    __slots__ = ("finished", "positions", "text", "tokens")

    def __init__(self) -> None:
        self.text = self.tokens = self.positions = 0
        self.finished = False

    def advance(self, completion: CompletionOutput) -> SequenceDelta | None:
        """What was added since the last call; None where nothing was."""
        if self.finished or (len(completion.token_ids) == self.tokens and not completion.finished):
            return None
        positions = completion.logprobs[self.positions :] if completion.logprobs else []
        piece = SequenceDelta(completion.text[self.text :], completion.token_ids[self.tokens :], positions)
        self.text, self.tokens, self.finished = len(completion.text), len(completion.token_ids), completion.finished
        self.positions += len(positions)
        return piece
