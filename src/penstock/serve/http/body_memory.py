"""Memory of request bodies: one budget per API process for all protocols, with a share per client."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from penstock.core import Code, PenstockError

UNCOUNTED_SIZE = 2**14
"""Maximum size in bytes of bodies that do not count towards the memory budget."""
MAX_WAITING = 128
"""Maximum number of unread bodies waiting for memory; further bodies are rejected immediately."""
MAX_WAITING_OF_CLIENT = MAX_WAITING // 4
"""Maximum number of waiting bodies per client."""


class BodyMemory:
    """Memory budget of request bodies, from their first byte until the end of their requests.

    A body waits, unread, until there is memory for it; clients are served round-robin. A body larger than its client's
    share is admitted if the client has no other body.

    Args:
        total: budget in bytes for all bodies. One client may use half of it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._by_client: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """Waiting bodies of each client (size, future), in the order in which clients are served."""
        self._num_waiting = 0

    async def reserve(self, client: str, size: int, timeout: float) -> Reservation:
        """Wait until there is memory for a body of ``size`` bytes.

        Raises ``PenstockError`` (``overloaded``) after ``timeout`` seconds, or immediately if too many bodies are
        waiting.
        """
        if client not in self._waiting and self._has_room(client, size):
            self._take(client, size)
        else:
            await self._wait(client, size, timeout)
        return Reservation(self, client, size)

    async def _wait(self, client: str, size: int, timeout: float) -> None:
        if self._num_waiting >= MAX_WAITING or len(self._waiting.get(client, ())) >= MAX_WAITING_OF_CLIENT:
            raise self._full(client, size)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (size, granted)
        self._waiting.setdefault(client, deque()).append(waiting)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout):
                await granted
        except BaseException as error:
            if not granted.cancelled() and granted.done():
                self._take(client, -size)
            elif waiting in self._waiting.get(client, ()):
                self._leave(client, waiting)
            self._grant()
            if isinstance(error, TimeoutError):
                raise self._full(client, size) from error
            raise
        finally:
            self._num_waiting -= 1

    def resize(self, client: str, old: int, new: int, parsed: bool) -> None:
        """Change the size of a reservation. Raises ``PenstockError`` (``overloaded``) if the budget is exhausted.

        Args:
            parsed: the reservation is for a parsed body, for which the budget is doubled.
        """
        self._take(client, -old)
        if new > old and not self._has_room(client, new, 2 if parsed else 1):
            self._take(client, old)
            raise self._full(client, new)
        self._take(client, new)
        if new < old:
            self._grant()

    def _has_room(self, client: str, size: int, factor: int = 1) -> bool:
        taken, total = self._by_client.get(client, 0), factor * self.total
        within_share = not taken or taken + size <= total // 2
        return not self.used or (within_share and self.used + size <= total)

    def _take(self, client: str, size: int) -> None:
        self.used += size
        self._by_client[client] += size
        if not self._by_client[client]:
            del self._by_client[client]

    def _grant(self) -> None:
        """Admit waiting bodies, clients round-robin."""
        granted = True
        while granted:
            granted = False
            for client in [*self._waiting]:
                size, future = waiting = self._waiting[client][0]
                if self._has_room(client, size):
                    self._leave(client, waiting)
                    if not future.done():
                        self._take(client, size)
                        future.set_result(None)
                    granted = True

    def _leave(self, client: str, waiting: tuple[int, asyncio.Future[None]]) -> None:
        """Remove a body from the queue, and move its client to the end."""
        bodies = self._waiting.pop(client)
        bodies.remove(waiting)
        if bodies:
            self._waiting[client] = bodies

    def _full(self, client: str, size: int) -> PenstockError:
        used = f"request bodies use {self.used} bytes, {self._by_client[client]} of them for this client"
        message = f"{used}: there is no room for {size} more of {self.total}; try again later"
        return PenstockError(Code.OVERLOADED, message, "max_body_memory", self.total)


class Reservation:
    """Reserved memory of one request."""

    def __init__(self, memory: BodyMemory, client: str, size: int = 0) -> None:
        self._memory = memory
        self._client = client
        self.size = size

    def resize(self, size: int, parsed: bool = False) -> None:
        """Change the size; errors as in ``BodyMemory.resize``."""
        self._memory.resize(self._client, self.size, size, parsed)
        self.size = size

    def joined(self, other: Reservation) -> Reservation:
        """Merge two reservations into a new one; both become empty."""
        both = Reservation(self._memory, self._client, self.size + other.size)
        self.size = other.size = 0
        return both

    def release(self) -> None:
        """Free the memory. Idempotent."""
        self.resize(0)
