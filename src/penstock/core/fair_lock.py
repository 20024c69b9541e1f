"""An asyncio semaphore that is fair among clients."""

from __future__ import annotations

import asyncio
from collections import deque


class FairLock:
    """A semaphore acquired by the waiting clients in turn (round robin), however many waiters each client has.

    Args:
        value: maximum number of concurrent holders.
    """

    def __init__(self, value: int = 1) -> None:
        self._free = value
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiters by client, in the order in which clients are served."""

    async def acquire(self, client: str) -> None:
        """Wait for the client's turn."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Pass the turn to the next client that waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # moves the client to the end of the order
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
