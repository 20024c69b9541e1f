"""``AsyncLLM``: an engine in a process of its own, for streams that come and go."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from penstock.core import Failure, SamplingParams, TokenDelta
from penstock.core.errors import invalid
from penstock.engine import wire
from penstock.engine.client import EngineClient

from .options import engine_options
from .outputs import RequestOutput
from .prompts import Messages, Preparer, Prompt


class AsyncLLM:
    """A model to stream from.

    >>> async with AsyncLLM() as llm:
    ...     async for output in llm.generate("Once upon a time"):
    ...         print(output.outputs[0].text)

    Arguments are those of ``LLM``. The engine starts on entering, and again by itself if it dies; what was open then
    ends with a failure at once.
    """

    def __init__(
        self, model: str | Path = "", *, tokenizer: str | Path = "", chat_template: str | None = None, **options: Any
    ) -> None:
        self.options = engine_options({"model": str(model)} | options)
        self._preparer = Preparer(model, tokenizer, chat_template)
        self._client: EngineClient | None = None
        self._open: dict[str, asyncio.Queue[TokenDelta | Failure]] = {}
        self._ids = itertools.count()

    async def __aenter__(self) -> Self:
        """Raises ``PenstockError`` with one sentence where the engine cannot start."""
        self._client = EngineClient(self.options, self._deliver, self._lost)
        self.ready: wire.Ready = await self._client.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """How the model's makers sample."""
        return self._preparer.default_sampling()

    @property
    def engine(self) -> EngineClient:
        if self._client is None:
            raise invalid("engine", "enter the AsyncLLM first: async with AsyncLLM(…) as llm")
        return self._client

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, after every step that added to it; the last one is finished.

        Leaving the loop cancels the request.

        Args:
            request_id: what the outputs are called; by default a number.
            timeout: seconds after which it fails.
        """
        name = str(next(self._ids))  # the engine's own name for it: the caller's may come twice
        assembler = self._preparer.request(name, prompt, sampling_params, priority)
        assembler.output.request_id = request_id or name
        request = assembler.request
        if timeout is not None:
            if not 0 <= timeout < math.inf:
                raise invalid("timeout", f"must be a number of seconds from 0 on, is {timeout}", 0)
            request = msgspec.structs.replace(request, deadline=time.monotonic() + timeout)
        deltas = self._open[name] = asyncio.Queue()
        try:
            await self.engine.add(request)
            while not assembler.output.finished:
                delta = await deltas.get()
                if isinstance(delta, Failure):
                    assembler.fail(delta)
                elif assembler.add(delta) is not None:
                    await self.engine.stop(name, delta.sequence)
                if assembler.output.finished or deltas.empty():
                    yield assembler.output
        finally:
            del self._open[name]
            if not assembler.output.finished:
                await asyncio.shield(self.engine.abort(name))

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; ``options`` are those of ``generate``."""
        prompt = self._preparer.conversation(messages, tools=tools, **(chat_template_kwargs or {}))
        async for output in self.generate(prompt, sampling_params, **options):
            yield output

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if (queue := self._open.get(delta.request_id)) is not None:
                queue.put_nowait(delta)

    def _lost(self, failure: Failure) -> None:
        for queue in self._open.values():
            queue.put_nowait(failure)
