"""``Gateway``: tokenizes requests, sends them to engine processes and streams their outputs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from penstock.core import Code, Failure, GeneratedSequence, PenstockError, PoolingParams, SamplingParams, TokenDelta
from penstock.core.errors import CANCELLED, invalid, too_long
from penstock.engine.service.pool import RESUME, EnginePool, ResumePolicy
from penstock.text.encoding import Texts
from penstock.text.infill import infill_prompt
from penstock.text.isolated_template import IsolatedTemplate

from .chat_renderer import Steps, Template
from .fair_queue import MAX_INLINE_TOKENS, TURN_SIZE, DeltaQueue, FairQueue
from .input_processor import InputProcessor
from .output_processor import OutputProcessor, per_token
from .outputs import RequestOutput, Resume
from .prompts import Messages, Prompt, TokenizedPrompt

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_INLINE_SIZE = 8192
"""Longest prompt, in characters, that is encoded in the event loop; longer prompts are encoded in a thread."""
FILE_SIZE = 16
"""Number of characters added to the size of each file of an infill prompt: even an empty file takes time to encode."""
NUM_ENCODE_THREADS = 2
"""Number of threads that encode prompts."""
NUM_MEDIA_THREADS = 8
"""Number of threads that fetch, decode and resize images and videos."""
MAX_SHRINKAGE = 4
"""Largest factor by which a tokenizer's normalization is assumed to shorten a text."""
DEADLINE_PASSED = Failure(Code.TIMEOUT, "the deadline has passed")


def owned(request_id: str, tenant: str) -> str:
    """Request id prefixed with its tenant, so that ids of different tenants never collide."""
    return f"{tenant}\0{request_id}" if tenant else request_id


class Gateway(Steps):
    """Sends requests to the engines of a model and streams their outputs. Create and use it in one event loop.

    Args:
        addresses: ZeroMQ addresses of the engine processes, one per data-parallel replica.
        input_processor: tokenizer, chat template and defaults of the model.
        request_cost, min_prefill_tokens, secret, resume: as in ``EnginePool``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        input_processor: InputProcessor,
        request_cost: int = 0,
        min_prefill_tokens: int = 0,
        secret: bytes = b"",
        resume: ResumePolicy = RESUME,
    ) -> None:
        self.input_processor = input_processor
        vocabulary = input_processor.vocabulary
        self.engine_pool = EnginePool(
            addresses,
            self._on_deltas,
            self._on_engine_lost,
            self._output_so_far,
            self._on_moved,
            self._on_changed,
            vocabulary,
            self._on_cancel,
            request_cost,
            min_prefill_tokens,
            secret,
            resume,
        )
        self.fair_queue = FairQueue()
        """Schedules the processing of long deltas on the event loop."""
        self._open: dict[str, DeltaQueue] = {}
        """Unprocessed deltas of open requests by engine request id."""
        self._processors: dict[str, OutputProcessor] = {}
        """Output processors of open requests by engine request id."""
        self._owned: dict[str, str] = {}
        """Tenant-prefixed request ids (``owned``) of open requests by engine request id."""
        self._ids = itertools.count()
        self._threads = ThreadPoolExecutor(NUM_ENCODE_THREADS, "encode")
        self._media_threads = ThreadPoolExecutor(NUM_MEDIA_THREADS, "media")
        self._max_inline_size = 0 if input_processor.tokenizer.isolated else MAX_INLINE_SIZE

    async def close(self) -> None:
        await self.engine_pool.close()
        self._threads.shutdown(wait=False)
        self._media_threads.shutdown(wait=False, cancel_futures=True)
        self.input_processor.close()

    async def encode(self, prompt: str | Sequence[int], add_special_tokens: bool = True, size: int = 0) -> list[int]:
        """Encode a prompt to token ids.

        Args:
            size: total number of characters of all prompts that the caller encodes in sequence, including this one;
                decides whether to encode in a thread.

        Raises ``PenstockError`` if the prompt is invalid or far too long, or no engine is ready.
        """
        self.check_length(prompt)
        return await self.prepare(
            max(size, len(prompt)), lambda: self.input_processor.encode(prompt, add_special_tokens)
        )

    async def tokenize(self, prompt: Prompt, timeout: float | None = None) -> TokenizedPrompt:
        """Encode a prompt of the Python interface, and load its images and videos.

        Args:
            timeout: time limit in seconds for prompts that are processed in a thread; None: no limit.

        Raises ``PenstockError`` like ``encode``, and with code ``timeout`` if encoding takes longer.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        self.check_length(prompt)
        size = len(prompt) if isinstance(prompt, str) else 0
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            size = self._max_inline_size + 1  # images are decoded in a thread
        try:
            async with asyncio.timeout(None if size <= self._max_inline_size else timeout):
                return await self.prepare(size, lambda: self.input_processor.tokenize(prompt))
        except TimeoutError as error:
            raise PenstockError.of(DEADLINE_PASSED) from error

    async def encode_infill(
        self,
        prefix: str | Sequence[int],
        suffix: str | Sequence[int],
        size: int = 0,
        files: Sequence[tuple[str, str]] = (),
    ) -> list[int]:
        """Encode a fill-in-the-middle prompt for the text between ``prefix`` and ``suffix``.

        Args:
            files: names and texts of other files, for context.
            size: as for ``encode``.

        Raises ``PenstockError`` as ``encode``, and ``unsupported`` if the model has no fill-in-the-middle tokens.
        """
        self.check_length(prefix)
        self.check_length(suffix)
        for _, text in files:
            self.check_length(text)
        characters = max(
            size, len(prefix) + len(suffix) + sum(FILE_SIZE + len(name) + len(text) for name, text in files)
        )
        tokenizer = self.input_processor.tokenizer
        return await self.prepare(characters, lambda: infill_prompt(tokenizer, prefix, suffix, files))

    async def encode_texts(self, texts: Texts, size: int = 0) -> TokenizedPrompt:
        """Encode a pair of texts, or a text with a token limit. Arguments and errors as for ``encode``."""
        if texts.max_len is None:
            self.check_length(texts.text)
        return await self.prepare(max(size, len(texts)), lambda: self.input_processor.encode_texts(texts))

    async def pair(self, first: str, second: str, client: str = "") -> Texts:
        """Format two texts as input of a cross-encoder.

        Args:
            client: as for ``ChatRenderer.prompt``.

        Raises ``PenstockError`` if the model's chat template rejects the texts.
        """
        pair = self.input_processor.pair(first, second)
        if isinstance(pair, Texts):
            return pair
        return await self.input_processor.chats.text(pair, {}, self, len(first) + len(second), client=client)

    async def chat_prompt(
        self, messages: Messages, size: int, options: Mapping[str, Any], **arguments: Any
    ) -> TokenizedPrompt:
        """Render and encode a chat, and load its images and videos.

        Args:
            size: approximate number of characters of the chat.
            options: keyword arguments of ``ChatTemplate.render``.
            arguments: other arguments of ``ChatRenderer.prompt``.

        Raises ``PenstockError`` if the chat is invalid or far too long, or no engine is ready.
        """
        if len(messages) > (maximum := self.engine_pool.known_engine().max_model_len):
            message = f"{len(messages)} messages do not fit the context of {maximum} tokens: send fewer"
            raise too_long("messages", message, len(messages), maximum)
        self.input_processor.check_chats()
        return await self.input_processor.chats.prompt(messages, options, self, size=size, **arguments)

    async def generate(
        self,
        prompt: TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        pooling: PoolingParams | None = None,
        arrived: float | None = None,
        external_id: str = "",
        tenant: str = "",
        trace: dict[str, str] | None = None,
        on_token: Callable[[RequestOutput], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; yields the cumulative output after each step, until it is finished.

        A caller that is slower than the engine gets the tokens of several steps at once. If more than ``MAX_QUEUED``
        tokens are queued, the request's sequences are paused in the engine. Closing the generator aborts the request.

        Args:
            request_id: ``request_id`` of the outputs; default: a number.
            timeout: seconds after arrival until the request fails, even if the engine hangs; None: no limit.
            cache_salt: the prefix cache is shared only by requests with the same salt.
            adapter: name of a loaded LoRA adapter.
            pooling: pool the prompt (embedding, classification) instead of generating.
            arrived: arrival time on the monotonic clock; None: now.
            external_id: request id given by the client; rejected while another request of the tenant has the same id,
                in any API process.
            tenant: tenant of the request; ids are unique per tenant.
            trace: as in ``EngineRequest``.
            on_token: called with the output after each token, even if the engine returns several at once, so that the
                sequence of calls depends on the tokens alone.

        Raises ``PenstockError`` if the request is invalid, or no engine is ready; and as ``on_token``.
        """
        arrived = time.monotonic() if arrived is None else arrived
        deadline = None
        if timeout is not None:
            if not 0 <= timeout < math.inf:
                raise invalid("timeout", f"must be a finite number of seconds, at least 0, is {timeout}", 0)
            deadline = arrived + timeout
        name = str(next(self._ids))  # the engine's id must be unique, unlike request_id
        processor = self.input_processor.create_output_processor(
            name,
            prompt,
            sampling_params,
            pooling,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            deadline=deadline,
            external_id=external_id and owned(external_id, tenant),
            log_id=request_id or "",
            trace=trace or {},
        )
        output = processor.output
        output.request_id, output.times.arrived = request_id or name, arrived
        inbox = self._open[name] = DeltaQueue(partial(self.engine_pool.pause, name))
        self._processors[name], self._owned[name] = processor, owned(output.request_id, tenant)
        timer = None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), self._on_deadline, name)
        try:
            output.times.sent = time.monotonic()
            self.engine_pool.add(processor.request)
            while not output.finished:
                await inbox.wait()
                if inbox.size > MAX_INLINE_TOKENS:
                    await self.fair_queue.wait_turn()
                changed, begun = False, time.perf_counter() if trace else 0.0
                for delta in inbox.pop(TURN_SIZE):
                    if isinstance(delta, Failure):
                        processor.fail(delta)
                    else:
                        for part in per_token(delta) if on_token else (delta,):
                            if processor.add(part) is not None:
                                self.engine_pool.finish_sequence(name, delta.sequence)
                            if on_token and not delta.failure:
                                on_token(output)
                    changed = changed or not _is_prompt_logprobs_part(delta)
                if trace:
                    output.times.detokenizing += time.perf_counter() - begun
                if changed:
                    yield output
        finally:
            if timer:
                timer.cancel()
            del self._open[name], self._processors[name], self._owned[name]
            self.engine_pool.release(name, abort=not output.finished, output=processor.token_ids(0))

    def running(self, tenant: str = "") -> dict[str, int]:
        """Number of generated tokens of each open request of a tenant, by request id."""
        result: dict[str, int] = {}
        for name, processor in self._processors.items():
            output = processor.output
            if self._owned[name] != owned(output.request_id, tenant):
                continue
            num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
            result[output.request_id] = result.get(output.request_id, 0) + num_tokens
        return result

    def cancel(self, request_ids: Collection[str], tenant: str = "") -> None:
        """Cancel requests of a tenant by id, in all API processes."""
        self.engine_pool.cancel([owned(request_id, tenant) for request_id in request_ids])

    async def prepare(self, size: int, work: Callable[[], T]) -> T:
        """Call ``work``, which processes ``size`` characters: in a thread above ``MAX_INLINE_SIZE``."""
        if size <= self._max_inline_size:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def in_media_thread(self, work: Callable[[], T]) -> T:
        """Call ``work``, which decodes a media file, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._media_threads, work)

    async def load(self, work: Sequence[Callable[[], T]]) -> list[T]:
        return await asyncio.gather(*map(self.in_media_thread, work))

    async def render(
        self, template: Template, messages: Messages, options: Mapping[str, Any], size: int, client: str
    ) -> str:
        """Render a chat, in another process unless the template is that of the built-in model."""
        if isinstance(template, IsolatedTemplate):
            return await template.render_async(messages, size, client, **options)
        return await self.prepare(size, partial(template.render, messages, **options))

    def check_length(self, prompt: Prompt) -> None:
        self.check_characters(len(prompt) if isinstance(prompt, str) else 0)

    def check_characters(self, count: int) -> None:
        """Raise ``PenstockError`` (``too_long``) if a text of ``count`` characters cannot fit the context."""
        engine = self.engine_pool.known_engine()
        maximum = engine.max_model_len
        if (minimum := count // (self._longest_token * MAX_SHRINKAGE)) >= maximum:
            message = f"has {count} characters, which cannot fit the context of {maximum} tokens: shorten it"
            raise too_long("prompt", message, max(minimum, maximum + 1), maximum)

    @cached_property
    def _longest_token(self) -> int:
        """Size of the longest token in bytes."""
        return max(map(len, self.input_processor.tokenizer.vocabulary))

    def _on_deltas(self, deltas: list[TokenDelta], weights_version: str) -> None:
        for delta in deltas:
            if (inbox := self._open.get(delta.request_id)) is not None:
                output = self._processors[delta.request_id].output
                if weights_version:
                    output.add_weights(weights_version)
                if output.is_waiting:
                    self._on_continued(delta.request_id, output)
                inbox.put(delta)

    def _output_so_far(self, name: str) -> list[GeneratedSequence]:
        """Output of a request that has arrived, including deltas that are not processed yet."""
        sequences = self._processors[name].generated()
        copies: dict[int, list[int]] = {}
        for delta in self._open[name]:
            if isinstance(delta, TokenDelta) and not (sequence := sequences[delta.sequence]).finished:
                if (tokens := copies.get(delta.sequence)) is None:
                    tokens = copies[delta.sequence] = list(sequence.token_ids)
                tokens += delta.token_ids
                sequences[delta.sequence] = GeneratedSequence(tokens, delta.finished is not None)
        return sequences

    def _on_moved(self, names: Collection[str], reason: str) -> None:
        for name in names:
            output, sequences = self._processors[name].output, self._output_so_far(name)
            if not all(one.finished for one in sequences):
                count = len(output.prompt_token_ids) + sum(len(one.token_ids) for one in sequences)
                output.resumes.append(Resume(reason, count))

    def _on_changed(self, name: str, engine: str) -> None:
        if (processor := self._processors.get(name)) and processor.output.resumes:
            processor.output.resumes[-1].changed_engine = engine

    def _on_continued(self, name: str, output: RequestOutput) -> None:
        resume, request = output.resumes[-1], self._processors[name].request
        for one in output.resumes:
            one.continued = one.continued or time.monotonic()
        assert resume.continued
        message = "request %s continues after %.2f s (%s): %d tokens were computed again"
        if resume.changed_engine:
            message += f"; the results of the other engine may differ: {resume.changed_engine}"
        pause = resume.continued - resume.lost
        logger.info(
            message, request.log_name, pause, resume.reason, resume.num_tokens, extra={"fields": request.log_fields}
        )

    def _on_deadline(self, name: str) -> None:
        """Fail a request at its deadline. The engine checks deadlines too, but not during a step or if it hangs."""
        if (inbox := self._open.get(name)) is not None:
            self.engine_pool.abort(name)
            inbox.put(DEADLINE_PASSED)

    def _on_cancel(self, request_ids: list[str]) -> None:
        cancelled = frozenset(request_ids)
        for name in [name for name, owned_id in self._owned.items() if owned_id in cancelled]:
            self.engine_pool.abort(name)
            self._open[name].put(CANCELLED)

    def _on_engine_lost(self, failure: Failure, lost: Collection[str]) -> None:
        for name in lost:
            self.engine_pool.abort(name)
            self._open[name].put(failure)


def _is_prompt_logprobs_part(delta: TokenDelta | Failure) -> bool:
    """True if a delta holds only prompt logprobs, with more to follow."""
    return (
        isinstance(delta, TokenDelta) and delta.prompt_logprobs is not None and not (delta.token_ids or delta.finished)
    )
