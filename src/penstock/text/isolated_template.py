"""Untrusted chat templates, rendered in processes with limits (``template_process``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.core.fair_lock import FairLock

from .chat_template import template_variables
from .isolated_process import IsolatedProcess
from .template_process import MAX_MEMORY, RenderRequest, RenderResult

RENDER_TIME = 2.0
"""Seconds of processor time of one rendering."""
QUICK_TIME = 0.25
"""Seconds of processor time after which a rendering moves to the slow lane."""
REPLY_TIMEOUT = 60.0
"""Seconds after which a process that does not answer is killed: a template's time is over long before."""
NUM_PROCESSES = 2
"""Quick renderings at a time, and slow ones at a time."""
MAX_QUICK_MESSAGES = 2000
"""Messages of a chat that may be quick to render; one with more goes to the slow lane at once."""
SLOW_PERIOD = 10.0
"""Seconds after a client's slow rendering in which its chats of that size go to the slow lane at once."""
MAX_INLINE = 2**18
"""Characters of a request that is encoded in the event loop; a longer one is encoded in a thread."""


class TemplatePool:
    """Processes that render templates; each is started when it is needed first.

    In an event loop, a rendering that is not done after ``QUICK_TIME`` is begun again in turn with other slow ones, so
    that it does not hold up the quick ones. Clients take turns, with quick ones as with slow ones.
    """

    def __init__(self) -> None:
        self._idle: list[IsolatedProcess] = []
        self._quick = FairLock(NUM_PROCESSES)
        self._slow = FairLock(NUM_PROCESSES)
        self._slow_clients: dict[str, tuple[float, int]] = {}
        """By client: when a rendering was slow last, and the size of the smallest slow chat."""
        self._closed = False

    def render(self, request: RenderRequest) -> RenderResult:
        """Render in the calling thread's turn."""
        request.cpu_time = RENDER_TIME
        message, process = encode(request), self._take()
        try:
            return self._result(process, process.ask(message, REPLY_TIMEOUT))
        except OSError:
            process.close()
            return RenderResult(exceeded=True)
        except BaseException:
            process.close()
            raise

    async def render_async(self, request: RenderRequest, size: int, client: str) -> RenderResult:
        """Render without blocking the event loop.

        Args:
            size: about how many characters the request has.
            client: whose chat it is.
        """
        lanes = [(self._quick, QUICK_TIME), (self._slow, RENDER_TIME)]
        if len(request.messages) > MAX_QUICK_MESSAGES or self._was_slow(client, size):
            lanes[0] = lanes[1]
        for lane, request.cpu_time in lanes:
            message = encode(request) if size <= MAX_INLINE else await asyncio.to_thread(encode, request)
            await lane.acquire(client)
            try:
                result = await self._ask(message)
            finally:
                lane.release()
            if result and (not result.exceeded or request.cpu_time == RENDER_TIME):
                return result
            self._remember_slow(client, size)
        return result or RenderResult(exceeded=True)

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _was_slow(self, client: str, size: int) -> bool:
        """Whether a chat of this client was slow in the last ``SLOW_PERIOD`` that was not larger."""
        when, slow_size = self._slow_clients.get(client, (0.0, 0))
        return bool(when) and time.monotonic() - when < SLOW_PERIOD and size >= slow_size

    def _remember_slow(self, client: str, size: int) -> None:
        now = time.monotonic()
        recent = {name: slow for name, slow in self._slow_clients.items() if now - slow[0] < SLOW_PERIOD}
        _, slow_size = recent.get(client, (now, size))
        self._slow_clients = recent | {client: (now, min(size, slow_size))}

    async def _ask(self, message: bytes) -> RenderResult | None:
        """None where the process has ended, be it that it was killed before it was asked."""
        process = self._take()
        try:
            return self._result(process, await process.ask_async(message, REPLY_TIMEOUT))
        except OSError:  # TimeoutError is one
            process.close()
            return None
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


@dataclass
class IsolatedTemplate:
    """A chat template that a process with limits renders."""

    source: str
    """As for ``ChatTemplate``."""
    special: Mapping[str, str]
    """As for ``ChatTemplate``."""
    pool: TemplatePool
    field: str = "messages"
    """The field that errors name: ``messages`` for a model's template, ``chat_template`` for a request's."""

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return template_variables(self.source)

    def start(self) -> None:
        """Start a process and compile the template there, so that the first chat does not wait for it."""
        with suppress(PenstockError):  # it refuses this chat, or any
            self.render([{"role": "user", "content": "Hello!"}], add_generation_prompt=True)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render a chat, see ``ChatTemplate.render``. Raises ``PenstockError`` (``invalid``) where it takes too long or
        too much memory, too."""
        return self._text(self.pool.render(self._request(messages, options)))

    async def render_async(
        self, messages: Sequence[Mapping[str, Any]], size: int, client: str, /, **options: Any
    ) -> str:
        """As ``render``, without blocking the event loop.

        Args:
            size: about how many characters the messages and options have.
            client: whose chat it is; clients take turns.
        """
        return self._text(await self.pool.render_async(self._request(messages, options), size, client))

    def _request(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> RenderRequest:
        return RenderRequest(self.source, dict(self.special), list(messages), options, RENDER_TIME)

    def _text(self, result: RenderResult) -> str:
        if result.exceeded:
            reason = (
                f"the chat template takes longer than {RENDER_TIME:g} seconds of processor time, "
                f"or more than {MAX_MEMORY / 2**30:g} GiB of memory"
            )
            raise invalid(self.field, reason, RENDER_TIME)
        if result.failure:
            raise PenstockError.of(result.failure)
        return result.text


def encode(request: RenderRequest) -> bytes:
    """Raises ``PenstockError`` (``invalid``) where a value cannot be sent."""
    try:
        return msgspec.json.encode(request)
    except (UnicodeEncodeError, RecursionError, TypeError) as error:
        raise invalid("messages", f"cannot be rendered: {error}") from error
