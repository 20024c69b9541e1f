"""Expensive results shared by concurrent callers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

INTERVAL = 0.05
"""Default of ``SharedResult.interval``: routers request metrics 20 times a second."""


class SharedResult(Generic[T]):
    """A result that is computed once for concurrent callers, at most once every ``interval`` seconds.

    A computation never starts before the call that it answers, so that no result is stale.

    Args:
        compute: called in the event loop.
        interval: minimum time between the starts of two computations, in seconds.
    """

    def __init__(self, compute: Callable[[], Awaitable[T]], interval: float = INTERVAL) -> None:
        self._compute = compute
        self._interval = interval
        self._begun = -interval
        self._computing = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None
        """The next computation, which has not started."""

    async def get(self) -> T:
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> T:
        loop = asyncio.get_running_loop()
        async with self._computing:
            await asyncio.sleep(max(0.0, self._begun + self._interval - loop.time()))
            self._begun, self._next = loop.time(), None
            return await self._compute()
