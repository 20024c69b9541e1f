"""The gateway: a model's text around a running engine. It is all of the house that a dialect sees."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec

from penstock.core import Failure, PoolingParams, SamplingParams, TokenDelta
from penstock.core.errors import invalid
from penstock.engine.client import EngineClient
from penstock.text.rendering import Rendering

from .foreign import ForeignTemplates
from .outputs import RequestOutput
from .prompts import Messages, Preparer, Prompt

T = TypeVar("T")

AT_ONCE = 8192
"""Characters that are encoded where they arrive; more than that would hold up the streams, and goes to a thread."""
ENCODERS = 2
"""Threads that encode."""
SPARE = 4
"""How many times shorter a text may become when a tokenizer normalizes it."""


class Gateway:
    """Streams from the engine at an address. To be made and used in one event loop.

    Args:
        address: where the engine process serves.
        preparer: the tokenizer, template and defaults of its model.
    """

    def __init__(self, address: str, preparer: Preparer) -> None:
        self.preparer = preparer
        self.engine = EngineClient(address, self._deliver, self._lost, preparer.vocabulary)
        self._open: dict[str, asyncio.Queue[TokenDelta | Failure]] = {}
        self._ids = itertools.count()
        self._foreign = ForeignTemplates()
        self._threads = ThreadPoolExecutor(ENCODERS, "encode")

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    async def close(self) -> None:
        self._foreign.close()
        await self.engine.close()
        self._threads.shutdown(wait=False)

    async def encode(self, prompt: Prompt, add_special_tokens: bool = True, size: int = 0) -> list[int]:
        """The token ids of a prompt.

        Args:
            size: characters that are to be encoded at the same time, where there are more than its own.

        Raises ``PenstockError`` where it is wrong or far too long, or no engine is there.
        """
        self._check_length(prompt)
        return await self._prepare(max(size, len(prompt)), lambda: self.preparer.encode(prompt, add_special_tokens))

    async def conversation(
        self,
        messages: Messages,
        size: int,
        options: Mapping[str, Any],
        calls: bool = False,
        template: str | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt.

        Args:
            size: about how many characters it has.
            options: those of ``ChatTemplate.render``.
            calls: whether the answer may call tools.
            template: to use in place of the model's.

        Raises ``PenstockError`` where it is wrong or far too long, or no engine is there.
        """
        if len(messages) > (most := self.engine.check().max_model_len):
            raise invalid("messages", f"{len(messages)} of them are more than {most} tokens can hold", most)
        if template is None:
            text = await self._prepare(size, lambda: self.preparer.render(messages, options))
        else:
            special = self.preparer.tokenizer.special
            text = await self._foreign.render(Rendering(template, special, list(messages), dict(options)))
        token_ids = await self.encode(text, add_special_tokens=False)
        reading = self.preparer.reading(text, messages, options, calls, template)
        return {"prompt": text, "prompt_token_ids": token_ids, "reading": reading}

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        pooling: PoolingParams | None = None,
        arrived: float | None = None,
        external_id: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output so far, after every step that added to it; the last one is finished.

        Leaving the loop cancels the request.

        Args:
            request_id: what the outputs are called; by default a number.
            timeout: seconds after its arrival after which it fails.
            cache_salt: shares cached prefixes only with requests of the same salt.
            adapter: the name of one that is loaded.
            pooling: makes a vector of the prompt, in place of going on with it.
            arrived: on the monotonic clock; None is now.
            external_id: refused where another request of this name has not ended, whichever process it came to.

        Raises ``PenstockError`` where the request is wrong, or no engine is there to take it.
        """
        arrived = time.monotonic() if arrived is None else arrived
        deadline = None
        if timeout is not None:
            if not 0 <= timeout < math.inf:
                raise invalid("timeout", f"must be a number of seconds from 0 on, is {timeout}", 0)
            deadline = arrived + timeout
        name = str(next(self._ids))  # the engine's own name for it: the caller's may come twice
        self._check_length(prompt)
        size = len(prompt) if isinstance(prompt, str) else 0
        assembler = await self._prepare(
            size,
            lambda: self.preparer.request(name, prompt, sampling_params, priority, cache_salt, adapter, pooling),
        )
        output = assembler.output
        output.request_id, output.times.arrived = request_id or name, arrived
        request = msgspec.structs.replace(assembler.request, deadline=deadline, external_id=external_id)
        deltas = self._open[name] = asyncio.Queue()
        try:
            self.engine.add(request)
            while not output.finished:
                delta = await deltas.get()
                if isinstance(delta, Failure):
                    assembler.fail(delta)
                elif await self._prepare(_size(delta), partial(assembler.add, delta)) is not None:
                    self.engine.stop(name, delta.sequence)
                yield output
        finally:
            del self._open[name]
            if not output.finished:
                self.engine.abort(name)

    async def _prepare(self, size: int, work: Callable[[], T]) -> T:
        if size <= AT_ONCE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_length(self, prompt: Prompt) -> None:
        """Refuse a text that no tokens could hold before anything is computed over it."""
        engine = self.engine.check()
        if isinstance(prompt, str) and len(prompt) > engine.max_model_len * self._longest_token * SPARE:
            words = f"has {len(prompt)} characters, far more than {engine.max_model_len} tokens can hold"
            raise invalid("prompt", words, engine.max_model_len)

    @cached_property
    def _longest_token(self) -> int:
        """In bytes."""
        return max(map(len, self.preparer.tokenizer.vocabulary))

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if (queue := self._open.get(delta.request_id)) is not None:
                queue.put_nowait(delta)

    def _lost(self, failure: Failure) -> None:
        for name, queue in self._open.items():
            self.engine.abort(name)
            queue.put_nowait(failure)


def _size(delta: TokenDelta) -> int:
    """How much work there is in it."""
    return sum(map(len, delta.prompt_logprobs or ()))
