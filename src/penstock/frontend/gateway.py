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

from penstock.core import Code, Failure, PenstockError, PoolingParams, SamplingParams, TokenDelta
from penstock.core.errors import invalid, too_long
from penstock.engine.service.client import EngineClient
from penstock.text.template_process import RenderRequest

from .fair_queue import LIGHT, PIECE, DeltaQueue, FairQueue
from .input_processor import InputProcessor, Messages, Prompt
from .outputs import RequestOutput
from .request_templates import TemplateRenderer

T = TypeVar("T")

AT_ONCE = 8192
"""Characters that are encoded where they arrive; more than that would hold up the streams, and goes to a thread."""
ENCODERS = 2
"""Threads that encode."""
SPARE = 4
"""How many times shorter a text may become when a tokenizer normalizes it."""
CANCELLED = Failure(Code.CANCELLED, "the request was cancelled")
TOO_LATE = Failure(Code.TIMEOUT, "the deadline has passed")


class Gateway:
    """Streams from the engine at an address. To be made and used in one event loop.

    Args:
        address: where the engine process serves.
        preparer: the tokenizer, template and defaults of its model.
    """

    def __init__(self, address: str, input_processor: InputProcessor) -> None:
        self.input_processor = input_processor
        self.engine = EngineClient(address, self._deliver, self._lost, input_processor.vocabulary, self._cancel)
        self.fair_queue = FairQueue()
        """For long work in this event loop."""
        self._open: dict[str, DeltaQueue] = {}
        self._outputs: dict[str, RequestOutput] = {}
        """Of the requests that are open, what they have so far."""
        self._ids = itertools.count()
        self._template_renderer = TemplateRenderer()
        self._threads = ThreadPoolExecutor(ENCODERS, "encode")
        self._at_once = 0 if input_processor.tokenizer.isolated else AT_ONCE

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    async def close(self) -> None:
        self._template_renderer.close()
        await self.engine.close()
        self._threads.shutdown(wait=False)
        self.input_processor.tokenizer.close()

    async def encode(self, prompt: Prompt, add_special_tokens: bool = True, size: int = 0) -> list[int]:
        """The token ids of a prompt.

        Args:
            size: characters that are to be encoded at the same time, where there are more than its own.

        Raises ``PenstockError`` where it is wrong or far too long, or no engine is there.
        """
        self._check_length(prompt)
        return await self._prepare(
            max(size, len(prompt)), lambda: self.input_processor.encode(prompt, add_special_tokens)
        )

    async def conversation(
        self,
        messages: Messages,
        size: int,
        options: Mapping[str, Any],
        calls: bool = False,
        template: str | None = None,
        add_special_tokens: bool = False,
    ) -> dict[str, Any]:
        """A conversation as a prompt.

        Args:
            size: about how many characters it has.
            options: those of ``ChatTemplate.render``.
            calls: whether the answer may call tools.
            template: to use in place of the model's.
            add_special_tokens: besides those that the template writes.

        Raises ``PenstockError`` where it is wrong or far too long, or no engine is there.
        """
        if len(messages) > (most := self.engine.check().max_model_len):
            raise too_long("messages", f"{len(messages)} of them are more than {most} tokens hold", len(messages), most)
        if template is None:
            text = await self._prepare(size, lambda: self.input_processor.render(messages, options))
        else:
            special = self.input_processor.tokenizer.special
            text = await self._template_renderer.render(RenderRequest(template, special, list(messages), dict(options)))
        token_ids = await self.encode(text, add_special_tokens)
        parser_config = self.input_processor.parser_config(text, messages, options, calls, template)
        return {"prompt": text, "prompt_token_ids": token_ids, "parser_config": parser_config}

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

        Who is slower than the engine gets what several steps added at a time, and where far too much waits, the
        request's sequences pause. Leaving the loop cancels the request.

        Args:
            request_id: what the outputs are called; by default a number.
            timeout: seconds after its arrival after which it fails, also while the engine does not answer.
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
        try:
            async with asyncio.timeout(None if size <= self._at_once else timeout):
                processor = await self._prepare(
                    size,
                    lambda: self.input_processor.request(
                        name, prompt, sampling_params, priority, cache_salt, adapter, pooling
                    ),
                )
        except TimeoutError as error:
            raise PenstockError.of(TOO_LATE) from error
        output = processor.output
        output.request_id, output.times.arrived = request_id or name, arrived
        request = msgspec.structs.replace(processor.request, deadline=deadline, external_id=external_id)
        inbox = self._open[name] = DeltaQueue(partial(self.engine.pause, name))
        self._outputs[name] = output
        timer = None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), self._expire, name)
        try:
            self.engine.add(request)
            while not output.finished:
                await inbox.wait()
                if inbox.size > LIGHT:
                    await self.fair_queue.next()
                told = False
                for delta in inbox.take(PIECE):
                    if isinstance(delta, Failure):
                        processor.fail(delta)
                    elif processor.add(delta) is not None:
                        self.engine.stop(name, delta.sequence)
                    told = told or not _is_part(delta)
                if told:
                    yield output
        finally:
            if timer:
                timer.cancel()
            del self._open[name], self._outputs[name]
            if not output.finished:
                self.engine.abort(name)

    def running(self) -> dict[str, int]:
        """Requests that came through here and have not ended, by what their outputs are called, and how many tokens
        each has generated."""
        found: dict[str, int] = {}
        for output in self._outputs.values():
            made = sum(len(made.token_ids) for made in output.outputs)
            found[output.request_id] = found.get(output.request_id, 0) + made
        return found

    async def _prepare(self, size: int, work: Callable[[], T]) -> T:
        if size <= self._at_once:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_length(self, prompt: Prompt) -> None:
        """Refuse a text that no tokens could hold before anything is computed over it."""
        engine = self.engine.check()
        most = engine.max_model_len
        if isinstance(prompt, str) and (least := len(prompt) // (self._longest_token * SPARE)) >= most:
            words = f"has {len(prompt)} characters, far more than {most} tokens can hold"
            raise too_long("prompt", words, max(least, most + 1), most)

    @cached_property
    def _longest_token(self) -> int:
        """In bytes."""
        return max(map(len, self.input_processor.tokenizer.vocabulary))

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if (inbox := self._open.get(delta.request_id)) is not None:
                inbox.put(delta)

    def _expire(self, name: str) -> None:
        """The engine ends requests at their deadlines, too, but not while it computes a step or hangs."""
        if (inbox := self._open.get(name)) is not None:
            self.engine.abort(name)
            inbox.put(TOO_LATE)

    def _cancel(self, request_ids: list[str]) -> None:
        wanted = frozenset(request_ids)
        for name in [name for name, output in self._outputs.items() if output.request_id in wanted]:
            self.engine.abort(name)
            self._open[name].put(CANCELLED)

    def _lost(self, failure: Failure) -> None:
        for name, inbox in self._open.items():
            self.engine.abort(name)
            inbox.put(failure)


def _is_part(delta: TokenDelta | Failure) -> bool:
    """Whether it has some of the prompt's log probabilities and nothing else, as more of them will come."""
    return (
        isinstance(delta, TokenDelta) and delta.prompt_logprobs is not None and not (delta.token_ids or delta.finished)
    )
