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
"""Maximum processor time of one rendering, in seconds."""
QUICK_TIME = 0.25
"""Processor time after which a rendering moves to the slow lane, in seconds."""
REPLY_TIMEOUT = 60.0
"""Elapsed time after which a process that does not reply is killed, in seconds; far more than ``RENDER_TIME``."""
NUM_PROCESSES = 2
"""Maximum number of concurrent renderings in each lane (quick, slow)."""
MAX_QUICK_MESSAGES = 2000
"""Number of messages above which a chat goes directly to the slow lane."""
SLOW_PERIOD = 10.0
"""Seconds after a slow rendering during which chats of the same client and size go directly to the slow lane."""
MAX_INLINE = 2**18
"""Number of characters above which a request is encoded in a thread instead of the event loop."""


class TemplatePool:
    """Processes that render templates, started on demand.

    In an event loop, a rendering that exceeds ``QUICK_TIME`` is restarted in the slow lane, so that it does not delay
    quick renderings. Each lane serves clients round-robin.
    """

    def __init__(self) -> None:
        self._idle: list[IsolatedProcess] = []
        self._quick = FairLock(NUM_PROCESSES)
        self._slow = FairLock(NUM_PROCESSES)
        self._slow_clients: dict[str, tuple[float, int]] = {}
        """Client → time of the last slow rendering, and size of the smallest slow chat."""
        self._closed = False

    def render(self, request: RenderRequest) -> RenderResult:
        """Render a chat, blocking the calling thread."""
        request.cpu_time = RENDER_TIME
        message, process = encode(request), self._take()
        try:
            return self._result(process, process.request(message, REPLY_TIMEOUT))
        except OSError:
            process.close()
            return RenderResult(exceeded=True)
        except BaseException:
            process.close()
            raise

    async def render_async(self, request: RenderRequest, size: int, client: str) -> RenderResult:
        """Render a chat without blocking the event loop.

        Args:
            size: approximate number of characters of the request.
            client: key of the client, for fair scheduling.
        """
        lanes = [(self._quick, QUICK_TIME), (self._slow, RENDER_TIME)]
        if len(request.messages) > MAX_QUICK_MESSAGES or self._was_slow(client, size):
            lanes[0] = lanes[1]
        for lane, request.cpu_time in lanes:
            message = encode(request) if size <= MAX_INLINE else await asyncio.to_thread(encode, request)
            await lane.acquire(client)
            try:
                result = await self._render(message)
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
        """True if a chat of this client and of at most this size was slow in the last ``SLOW_PERIOD`` seconds."""
        when, slow_size = self._slow_clients.get(client, (0.0, 0))
        return bool(when) and time.monotonic() - when < SLOW_PERIOD and size >= slow_size

    def _remember_slow(self, client: str, size: int) -> None:
        now = time.monotonic()
        recent = {name: slow for name, slow in self._slow_clients.items() if now - slow[0] < SLOW_PERIOD}
        _, slow_size = recent.get(client, (now, size))
        self._slow_clients = recent | {client: (now, min(size, slow_size))}

    async def _render(self, message: bytes) -> RenderResult | None:
        """Render in an idle or new process. Returns None if the process has ended or does not reply."""
        process = self._take()
        try:
            return self._result(process, await process.request_async(message, REPLY_TIMEOUT))
        except OSError:  # also TimeoutError, its subclass
            process.close()
            return None
        except BaseException:
            process.close()  # else the next request would receive the late reply to this one
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
    """A chat template rendered in a process with limits."""

    source: str
    """Text of the template."""
    special: Mapping[str, str]
    """Special tokens by role."""
    pool: TemplatePool
    field: str = "messages"
    """Request field named in errors: ``messages`` for the model's template, ``chat_template`` for one in a request."""

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return template_variables(self.source)

    def start(self) -> None:
        """Start a process and compile the template there, so that the first chat does not wait for the compilation."""
        with suppress(PenstockError):  # the template may refuse this chat
            self.render([{"role": "user", "content": "Hello!"}], add_generation_prompt=True)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render a chat; see ``ChatTemplate.render``. Exceeding the time or memory limit also raises ``PenstockError``
        (``invalid``)."""
        return self._text(self.pool.render(self._request(messages, options)))

    async def render_async(
        self, messages: Sequence[Mapping[str, Any]], size: int, client: str, /, **options: Any
    ) -> str:
        """Same as ``render``, without blocking the event loop.

        Args:
            size: approximate number of characters of the messages and options.
            client: key of the client, for fair scheduling.
        """
        return self._text(await self.pool.render_async(self._request(messages, options), size, client))

    def _request(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> RenderRequest:
        return RenderRequest(self.source, dict(self.special), list(messages), options, RENDER_TIME)

    def _text(self, result: RenderResult) -> str:
        if result.exceeded:
            message = (
                f"the chat template takes more than {RENDER_TIME:g} seconds of processor time or "
                f"{MAX_MEMORY / 2**30:g} GiB of memory: send a shorter chat or use a simpler template"
            )
            raise invalid(self.field, message, RENDER_TIME)
        if result.failure:
            raise PenstockError.of(result.failure)
        return result.text


def encode(request: RenderRequest) -> bytes:
    """Encode a request. Raises ``PenstockError`` (``invalid``) if it has a value that JSON cannot represent."""
    try:
        return msgspec.json.encode(request)
    except (UnicodeEncodeError, RecursionError, TypeError) as error:
        raise invalid("messages", f"cannot be rendered: {error}") from error
