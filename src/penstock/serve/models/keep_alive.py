"""The time for which an idle model stays loaded, in one API process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from penstock.core import PenstockError
from penstock.engine.service.pool import EnginePool

RETRY_INTERVAL = 10.0
"""Minimum seconds until a process reports a model again that could not be unloaded, unless it had a request."""


class IdleRequests(NamedTuple):
    """Requests to the supervisor about an idle model."""

    report_idle: Callable[[], Awaitable[None]]
    """Ask to unload the model; returns when it is unloaded, or an API process has a request."""
    change: Callable[[float | None], Awaitable[None]]
    """Send a new keep-alive time, which applies to all API processes."""
    load: Callable[[], Awaitable[None]]
    """Ask to load the model; returns when it is loaded."""


class KeepAlive:
    """Reports a model of which this process has had no request for its keep-alive time, and loads it on demand.

    The supervisor unloads the model if all API processes agree. Until it is loaded again, the pool holds requests.

    Args:
        requests: requests to the supervisor; None: this process has no supervisor, and the model stays loaded.
    """

    def __init__(self, pool: EnginePool, requests: IdleRequests | None = None) -> None:
        self._pool = pool
        self._requests = requests
        self.may_change = requests is not None
        """False if the supervisor does not unload the model: changes of the keep-alive time have no effect."""
        self.seconds: float | None = None
        """Keep-alive time in seconds; None: the model stays loaded."""
        self._next: float | None = None
        self._has_next = False
        """True if ``_next`` applies once the open requests have ended."""
        self._last_use = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_expired(self) -> bool:
        """True if this process has no request of the model, and its keep-alive time has passed."""
        left = self._left
        return self._pool.is_idle and left is not None and left <= 0

    @property
    def expires(self) -> float | None:
        """Time of the epoch at which the model is unloaded unless it gets a request; None: it stays loaded."""
        seconds = self._next if self._has_next else self.seconds
        if seconds is None:
            return None
        idle = time.monotonic() - self._last_use if self._pool.is_idle else 0.0
        return time.time() + seconds - idle

    def set(self, seconds: float | None) -> None:
        """Set the keep-alive time that the supervisor has announced."""
        if seconds == self.seconds:
            return
        if self.seconds is None:
            self._last_use = time.monotonic()  # earlier ends of requests were not observed
        self.seconds = seconds
        self._observe()
        self._arm()

    def touch(self) -> None:
        """Count the time from now on."""
        self._last_use = time.monotonic()
        self._arm()

    def release(self) -> None:
        """Send the held requests: the model is loaded, or could not be unloaded as another process has a request."""
        self._last_use = time.monotonic()
        self._stop_timer()
        if self._pool.is_idle:
            self._arm(RETRY_INTERVAL)
        self._pool.hold(False)

    def change_after_requests(self, seconds: float | None) -> None:
        """Change the keep-alive time of the model once its open requests have ended."""
        self._next, self._has_next = seconds, self.may_change
        self._observe()

    async def change(self, seconds: float | None) -> None:
        """Change the keep-alive time of the model now."""
        self._has_next = False
        self._observe()
        self._last_use = time.monotonic()
        if self._requests and self.may_change and seconds != self.seconds:
            await self._requests.change(seconds)

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """Context in which the model is loaded, as with an open request. Raises ``PenstockError`` if it cannot be
        loaded."""
        with self._pool.use():
            if self._requests and self._pool.is_held:
                await self._requests.load()
                await self._pool.connected()
            yield

    def close(self) -> None:
        self._stop_timer()
        for task in self._tasks:
            task.cancel()

    def _observe(self) -> None:
        """Observe the ends of requests, except while the model stays loaded: then they need no work."""
        needed = self._requests and (self.seconds is not None or self._has_next)
        self._pool.on_idle = self._on_idle if needed else None

    @property
    def _left(self) -> float | None:
        return None if self.seconds is None else self._last_use + self.seconds - time.monotonic()

    def _on_idle(self) -> None:
        self._last_use = time.monotonic()
        if self._has_next:
            self._spawn(self.change(self._next))
        if self._timer is None:
            self._arm()

    def _arm(self, minimum: float = 0.0) -> None:
        self._stop_timer()
        if (left := self._left) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(left, minimum), self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._pool.is_held or not self._pool.is_idle:
            return  # ``touch``, ``release`` and ``_on_idle`` start the timer again
        if self.is_expired:
            self._spawn(self._unload())
        else:
            self._arm()

    async def _unload(self) -> None:
        assert self._requests
        await self._requests.report_idle()
        if not self._pool.is_held and self._timer is None:
            self._arm(RETRY_INTERVAL)

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            with suppress(PenstockError):  # the server is stopping
                await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
