"""Fair shares of an event loop: long work in pieces, one of them in each iteration, and queues that do not grow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from penstock.core import Failure, TokenDelta

LIGHT = 64
"""Tokens and log probabilities that are handled as they come; more than that waits for its turn."""
PIECE = 1024
"""Of them handled in one turn: some milliseconds."""
FULL = 2**16
"""Of them that may wait for one request before its sequences are paused; they go on once a quarter is left."""


class FairQueue:
    """Runs long work of many tasks a piece in each iteration of the event loop, one task after the other.

    However many tasks have long work, an iteration takes no longer than its longest piece and what is short.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._granting = False

    async def next(self) -> None:
        """Wait for a turn; the piece is what the task does until it waits again."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if not self._granting:
            self._granting = True
            loop.call_soon(self._grant)
        await turn

    def _grant(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._grant)
                return
        self._granting = False


class DeltaQueue:
    """What has come for one request and has not been taken yet.

    Args:
        pause: called with True where too much waits, and with False once it has been taken.
    """

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self._pause = pause
        self._paused = False
        self._items: deque[TokenDelta | Failure] = deque()
        self._came = asyncio.Event()
        self.size = 0
        """Tokens and log probabilities that wait."""

    def put(self, item: TokenDelta | Failure) -> None:
        self._items.append(item)
        self.size += size_of(item)
        self._came.set()
        if self.size > FULL and not self._paused:
            self._paused = True
            self._pause(True)

    async def wait(self) -> None:
        """Until something is there."""
        await self._came.wait()

    def take(self, most: int) -> Iterator[TokenDelta | Failure]:
        """What came first, until it has ``most`` tokens and log probabilities; at least one item."""
        taken = 0
        while self._items and (not taken or taken < most):
            item = self._items.popleft()
            size = size_of(item)
            taken += size
            self.size -= size
            yield item
        if not self._items:
            self._came.clear()
        if self._paused and self.size < FULL // 4:
            self._paused = False
            self._pause(False)


def size_of(item: TokenDelta | Failure) -> int:
    """Tokens and log probabilities in it, at least 1."""
    if isinstance(item, Failure):
        return 1
    told = [*(item.logprobs or ()), *(item.prompt_logprobs or ())]
    return len(item.token_ids) + sum(map(len, told)) or 1
