"""Results that take long to compute, shared by all who ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

INTERVAL = 0.05
"""Seconds between two computations: routers ask for metrics 20 times a second."""


class SharedResult(Generic[T]):
    """A result that is computed for all who ask at about the same time, at most once in ``interval`` seconds.

    A computation never begins before the question that it answers, so no result is out of date.

    Args:
        compute: is called in the event loop.
        interval: seconds between the beginnings of two computations.
    """

    def __init__(self, compute: Callable[[], Awaitable[T]], interval: float = INTERVAL) -> None:
        self._compute = compute
        self._interval = interval
        self._begun = -interval
        self._computing = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None
        """The computation that has not begun."""

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
