"""Requests on their way through the gateway: counted, told piece by piece, several prompts at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from penstock.core import Code, Failure, FinishReason, PenstockError, SamplingParams
from penstock.frontend.input_processor import Prompt
from penstock.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput

from .http.request_record import RequestRecord
from .models.service import ModelService

AT_ONCE = 64
"""Prompts of one request that are with the engine at the same time, so that it fills no queue by itself."""
CANCELLED = Failure(Code.CANCELLED, "the request was cancelled")


async def generate(
    service: ModelService,
    record: RequestRecord,
    prompt: Prompt,
    sampling: SamplingParams,
    **options: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """The output so far after every step, or once where streaming is off; metrics and record are kept.

    ``options`` are the gateway's; of ``timeout`` and what the server allows, the shorter one holds.

    Raises ``PenstockError`` where the request fails, at its beginning or later.
    """
    service.metrics.record_arrival(sampling)
    record.facts["model"] = service.name
    if adapter := options.get("adapter"):
        record.facts["adapter"] = adapter
    given = (options.pop("timeout", None), service.timeout)
    timeout = min([each for each in given if each is not None], default=None)
    stream = service.gateway.generate(
        prompt, sampling, record.request_id, timeout=timeout, arrived=record.begun, **options
    )
    metrics, told, last = service.metrics, 0, None
    quiet = service.options.disable_streaming
    async with aclosing(stream) as outputs:
        async for output in outputs:
            for made in output.outputs:
                if made.failure or made.finish_reason == FinishReason.CANCELLED:
                    raise PenstockError.of(made.failure or CANCELLED)
            if output.embedding:
                metrics.record_first_token(output)
            tokens = sum([len(made.token_ids) for made in output.outputs]) + output.num_discarded_tokens
            if tokens > told:
                if not told:
                    metrics.record_first_token(output)
                now = output.times.last_token
                metrics.record_tokens(tokens - told, now - last if now and last else None, len(output.outputs))
                told, last = tokens, now
            if output.finished:
                metrics.record_finish(output)
                record.note(output)
            if output.finished or not quiet:
                yield output


async def merge_streams(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several requests as they come, each with the number of its stream. The first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    news: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(AT_ONCE)
    window = asyncio.Semaphore(AT_ONCE)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with window, aclosing(stream) as outputs:
                async for output in outputs:
                    await news.put((index, output))
            await news.put((index, None))
        except Exception as error:
            await news.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, new = await news.get()
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
    """What is new of a sequence."""

    text: str
    token_ids: list[int]
    positions: list[PositionLogprobs]


class SequenceCursor:
    """How much of a sequence has been told."""

    __slots__ = ("finished", "positions", "text", "tokens")

    def __init__(self) -> None:
        self.text = self.tokens = self.positions = 0
        self.finished = False

    def advance(self, made: CompletionOutput) -> SequenceDelta | None:
        """What is new since the last time; None where nothing is."""
        if self.finished or (len(made.token_ids) == self.tokens and not made.finished):
            return None
        positions = made.logprobs[self.positions :] if made.logprobs else []
        piece = SequenceDelta(made.text[self.text :], made.token_ids[self.tokens :], positions)
        self.text, self.tokens, self.finished = len(made.text), len(made.token_ids), made.finished
        self.positions += len(positions)
        return piece
