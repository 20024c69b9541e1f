"""Memory of request bodies: one budget for all protocols of an API process, with a share for each client."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from penstock.core import Code, PenstockError

UNCOUNTED_SIZE = 2**14
"""Bytes of a body that is not counted."""
MAX_WAITING = 128
"""Bodies that wait for memory, unread; further ones are refused at once."""
MAX_WAITING_OF_CLIENT = MAX_WAITING // 4
"""Bodies of one client that may wait at a time."""


class BodyMemory:
    """Bytes that request bodies take, from their first byte until their requests end.

    A body waits, unread, until there is room for it; clients take turns. A body that is larger than its client's share
    gets room while its client has no other.

    Args:
        total: bytes of all bodies together. One client may take half of it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._by_client: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """Sizes that clients wait for, by client, in the order of their next turns."""
        self._num_waiting = 0

    async def reserve(self, client: str, size: int, patience: float) -> Reservation:
        """Wait until there is room for a body of ``size`` bytes.

        Raises ``PenstockError`` (``overloaded``) after ``patience`` seconds, or at once where too many bodies wait, of
        this client or of all.
        """
        if client not in self._waiting and self._has_room(client, size):
            self._take(client, size)
        else:
            await self._wait(client, size, patience)
        return Reservation(self, client, size)

    async def _wait(self, client: str, size: int, patience: float) -> None:
        if self._num_waiting >= MAX_WAITING or len(self._waiting.get(client, ())) >= MAX_WAITING_OF_CLIENT:
            raise self._full(client, size)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (size, granted)
        self._waiting.setdefault(client, deque()).append(waiting)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(patience):
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
        """Change the size of a reservation. Raises ``PenstockError`` (``overloaded``) where there is no room.

        Args:
            parsed: whether it is of a parsed body, for which there is as much memory again as for those that are read.
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
        """Give room to waiting bodies, one of each client after the other."""
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
        """End a body's waiting; the client's others have their turn after those of other clients."""
        bodies = self._waiting.pop(client)
        bodies.remove(waiting)
        if bodies:
            self._waiting[client] = bodies

    def _full(self, client: str, size: int) -> PenstockError:
        what = f"{self.used} bytes, {self._by_client[client]} of them of this client"
        message = f"the bodies of open requests have {what}: there is no room for {size} more of {self.total}"
        return PenstockError(Code.OVERLOADED, message, "max_body_memory", self.total)


class Reservation:
    """The memory of one request's body."""

    def __init__(self, memory: BodyMemory, client: str, size: int = 0) -> None:
        self._memory = memory
        self._client = client
        self.size = size

    def resize(self, size: int, parsed: bool = False) -> None:
        """Arguments and errors as of ``BodyMemory.resize``."""
        self._memory.resize(self._client, self.size, size, parsed)
        self.size = size

    def joined(self, other: Reservation) -> Reservation:
        """One reservation of both; these hold nothing then."""
        both = Reservation(self._memory, self._client, self.size + other.size)
        self.size = other.size = 0
        return both

    def release(self) -> None:
        """Free the memory; may be called again."""
        self.resize(0)
