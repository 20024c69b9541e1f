"""Fair use of the event loop: long work is split into chunks, one per iteration, and queues of deltas are bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from penstock.core import Failure, TokenDelta

MAX_INLINE_TOKENS = 64
"""Largest number of tokens and logprobs processed immediately; a task with more waits for its turn."""
TURN_SIZE = 1024
"""Number of tokens and logprobs processed per turn: a few milliseconds of work."""
MAX_QUEUED = 2**16
"""Number of queued tokens and logprobs above which the sequences of a request are paused. They resume below a quarter
of it."""


class FairQueue:
    """Schedules chunks of long CPU work on the event loop: one chunk per iteration, round robin over clients.

    An iteration therefore takes no longer than one chunk, however many tasks have long work.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting tasks by client, in the order of the clients' next turns."""
        self._granting = False

    async def wait_turn(self, client: str = "") -> None:
        """Wait until this task may process its next chunk; its turn ends with its next ``await``.

        Args:
            client: client that the work is done for; clients take turns, each with its oldest task.
        """
        loop = asyncio.get_running_loop()
        if not self._granting:  # no other task has work in this iteration
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
                self._waiting[client] = turns  # this client's next turn is after the other clients'
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._grant)
                return
        self._granting = False


class DeltaQueue:
    """Unprocessed deltas of one request.

    Args:
        pause: called with True if the queue exceeds ``MAX_QUEUED``, and with False once it is below a quarter of it.
    """

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self._pause = pause
        self._paused = False
        self._items: deque[TokenDelta | Failure] = deque()
        self._not_empty = asyncio.Event()
        self.size = 0
        """Number of tokens and logprobs in the queue."""

    def put(self, item: TokenDelta | Failure) -> None:
        self._items.append(item)
        self.size += size_of(item)
        self._not_empty.set()
        if self.size > MAX_QUEUED and not self._paused:
            self._paused = True
            self._pause(True)

    def __iter__(self) -> Iterator[TokenDelta | Failure]:
        return iter(self._items)

    async def wait(self) -> None:
        """Wait until the queue is not empty."""
        await self._not_empty.wait()

    def pop(self, maximum: int) -> Iterator[TokenDelta | Failure]:
        """Remove and yield items from the front, at least one, until ``maximum`` tokens and logprobs are taken."""
        taken = 0
        while self._items and (not taken or taken < maximum):
            item = self._items.popleft()
            size = size_of(item)
            taken += size
            self.size -= size
            yield item
        if not self._items:
            self._not_empty.clear()
        if self._paused and self.size < MAX_QUEUED // 4:
            self._paused = False
            self._pause(False)


def size_of(item: TokenDelta | Failure) -> int:
    """Number of tokens and logprobs in an item, at least 1."""
    if isinstance(item, Failure):
        return 1
    logprobs = [*(item.logprobs or ()), *(item.prompt_logprobs or ())]
    return len(item.token_ids) + sum(map(len, logprobs)) or 1
