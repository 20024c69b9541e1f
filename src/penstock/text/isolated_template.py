"""Untrusted chat templates, rendered in processes with limits (``template_process``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from penstock.core import PenstockError
from penstock.core.errors import invalid

from .chat_template import template_variables
from .isolated_process import IsolatedProcess
from .template_process import MAX_MEMORY, RenderRequest, RenderResult

RENDER_TIME = 2.0
"""Seconds of processor time of one rendering."""
QUICK_TIME = 0.25
"""Seconds of processor time after which a rendering is put behind the quick ones."""
REPLY_TIMEOUT = 60.0
"""Seconds after which a process that does not answer is killed: a template's time is over long before."""
NUM_PROCESSES = 2
"""Quick renderings at a time, and slow ones at a time."""
MAX_INLINE = 2**18
"""Characters of a request that is encoded in the event loop; a longer one is encoded in a thread."""


class TemplatePool:
    """Processes that render templates; each is started when it is needed first.

    In an event loop, a rendering that is not done after ``QUICK_TIME`` is begun again in turn with other slow ones, so
    that it does not hold up the quick ones.
    """

    def __init__(self) -> None:
        self._idle: list[IsolatedProcess] = []
        self._quick = asyncio.Semaphore(NUM_PROCESSES)
        self._slow = asyncio.Semaphore(NUM_PROCESSES)
        self._closed = False

    def render(self, request: RenderRequest) -> RenderResult:
        """Render in the calling thread's turn."""
        request.cpu_time = RENDER_TIME
        message, process = encode(request), self._take()
        try:
            return self._result(process, process.ask(message, REPLY_TIMEOUT))
        except OSError:
            return self._lost(process)
        except BaseException:
            process.close()
            raise

    async def render_async(self, request: RenderRequest, size: int) -> RenderResult:
        """Render without blocking the event loop.

        Args:
            size: about how many characters the request has.
        """
        for lane, request.cpu_time in ((self._quick, QUICK_TIME), (self._slow, RENDER_TIME)):
            message = encode(request) if size <= MAX_INLINE else await asyncio.to_thread(encode, request)
            async with lane:
                result = await self._ask(message)
            if not result.exceeded:
                break
        return result

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _ask(self, message: bytes) -> RenderResult:
        process = self._take()
        try:
            return self._result(process, await process.ask_async(message, REPLY_TIMEOUT))
        except OSError:  # TimeoutError is one
            return self._lost(process)
        except BaseException:
            process.close()  # the late reply must not be taken for the next request's
            raise

    def _take(self) -> IsolatedProcess:
        while self._idle:
            if (process := self._idle.pop()).running:
                return process
            process.close()
        return IsolatedProcess("penstock.text.template_process")

    def _result(self, process: IsolatedProcess, reply: bytes) -> RenderResult:
        result = msgspec.json.decode(reply, type=RenderResult)
        if result.last or self._closed:
            process.close()
        else:
            self._idle.append(process)
        return result

    def _lost(self, process: IsolatedProcess) -> RenderResult:
        process.close()
        return RenderResult(exceeded=True)


class IsolatedTemplate:
    """A chat template that a process with limits renders.

    Args:
        source, special: as for ``ChatTemplate``.
        field: the field that errors name: ``messages`` for a model's template, ``chat_template`` for a request's.
    """

    def __init__(self, source: str, special: Mapping[str, str], pool: TemplatePool, field: str = "messages") -> None:
        self._source = source
        self._special = dict(special)
        self._pool = pool
        self._field = field

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return template_variables(self._source)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render a chat, see ``ChatTemplate.render``. Raises ``PenstockError`` (``invalid``) where it takes too long or
        too much memory, too."""
        return self._text(self._pool.render(self._request(messages, options)))

    async def render_async(self, messages: Sequence[Mapping[str, Any]], size: int, /, **options: Any) -> str:
        """As ``render``, without blocking the event loop.

        Args:
            size: about how many characters the messages and options have.
        """
        return self._text(await self._pool.render_async(self._request(messages, options), size))

    def _request(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> RenderRequest:
        return RenderRequest(self._source, self._special, list(messages), options, RENDER_TIME)

    def _text(self, result: RenderResult) -> str:
        if result.exceeded:
            reason = (
                f"the chat template takes longer than {RENDER_TIME:g} seconds of processor time, "
                f"or more than {MAX_MEMORY / 2**30:g} GiB of memory"
            )
            raise invalid(self._field, reason, RENDER_TIME)
        if result.failure:
            raise PenstockError.of(result.failure)
        return result.text


def encode(request: RenderRequest) -> bytes:
    """Raises ``PenstockError`` (``invalid``) where a value cannot be sent."""
    try:
        return msgspec.json.encode(request)
    except (UnicodeEncodeError, RecursionError, TypeError) as error:
        raise invalid("messages", f"cannot be rendered: {error}") from error
