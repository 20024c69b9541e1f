"""Sharing the event loop: long work in pieces, one piece per iteration, and bounded queues of deltas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from penstock.core import Failure, TokenDelta

MAX_INLINE_TOKENS = 64
"""Tokens and logprobs that are processed at once; a task with more waits for its turn."""
TURN_SIZE = 1024
"""Tokens and logprobs processed in one turn: some milliseconds of work."""
MAX_QUEUED = 2**16
"""Tokens and logprobs queued for one request at which its sequences are paused; they resume at a quarter of it."""


class FairQueue:
    """Shares the event loop among tasks that do long CPU work in pieces: one piece per iteration of the loop, round
    robin over clients.

    So an iteration lasts no longer than one piece, however many tasks have long work.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By client, in the order of their next turns."""
        self._granting = False

    async def wait_turn(self, client: str = "") -> None:
        """Wait until this task may do its next piece of work; it has the event loop until its next ``await``.

        Args:
            client: whose work it is; clients take turns, each with its oldest task.
        """
        loop = asyncio.get_running_loop()
        if not self._granting:  # nobody else has work in this iteration
            self._granting = True
            loop.call_soon(self._grant)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _grant(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # after the other clients
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._grant)
                return
        self._granting = False


class DeltaQueue:
    """Deltas of one request that are not processed yet.

    Args:
        pause: called with True when the queue is too long, and with False once it has shrunk.
    """

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self._pause = pause
        self._paused = False
        self._items: deque[TokenDelta | Failure] = deque()
        self._came = asyncio.Event()
        self.size = 0
        """Tokens and logprobs in the queue."""

    def put(self, item: TokenDelta | Failure) -> None:
        self._items.append(item)
        self.size += size_of(item)
        self._came.set()
        if self.size > MAX_QUEUED and not self._paused:
            self._paused = True
            self._pause(True)

    async def wait(self) -> None:
        """Wait until the queue is not empty."""
        await self._came.wait()

    def pop(self, maximum: int) -> Iterator[TokenDelta | Failure]:
        """Remove items from the front, at least one, until they have ``maximum`` tokens and logprobs."""
        taken = 0
        while self._items and (not taken or taken < maximum):
            item = self._items.popleft()
            size = size_of(item)
            taken += size
            self.size -= size
            yield item
        if not self._items:
            self._came.clear()
        if self._paused and self.size < MAX_QUEUED // 4:
            self._paused = False
            self._pause(False)


def size_of(item: TokenDelta | Failure) -> int:
    """Number of tokens and logprobs in an item, at least 1."""
    if isinstance(item, Failure):
        return 1
    logprobs = [*(item.logprobs or ()), *(item.prompt_logprobs or ())]
    return len(item.token_ids) + sum(map(len, logprobs)) or 1
