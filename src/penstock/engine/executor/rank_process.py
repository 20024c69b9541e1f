"""A worker process of one rank, as the executor that has started it sees it."""

from __future__ import annotations

import time

from ..exit_status import exit_reason
from ..step import encoder
from .fork_server import fork_worker
from .messages import Close, Start
from .poller import PeerLostError, Poller
from .ring import Reader, Writer


class RankProcess:
    """The process and the two rings that connect it.

    Args:
        start: with the rings, which are this object's from now on.
        poller: of all ranks' processes.
    """

    def __init__(self, start: Start, poller: Poller) -> None:
        self.rank = start.rank_info.world_rank
        self._rings = start.inbox, start.outbox
        rings = [ring for ring in (*self._rings, start.previous, start.following) if ring]
        inherited = [descriptor for ring in rings for descriptor in ring.all]
        inherited += [each.descriptor for each in start.sockets]
        if start.memory is not None:
            inherited.append(start.memory)
        try:
            self._writer = Writer(start.inbox, poller)
            self._reader = Reader(start.outbox, poller)
            self._process = fork_worker(start, inherited)
        except BaseException:
            for ring in self._rings:
                ring.close()
            raise
        poller.add_peer(self._process.pidfd)
        poller.add_source(self._reader)

    def __str__(self) -> str:
        return f"the worker of rank {self.rank} (process {self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status; None where it has not ended, or that is not known."""
        return self._process.status() if self._process.wait(timeout=0) else None

    @property
    def end_reason(self) -> str | None:
        """How it ended, in words; None where it has not."""
        if not self._process.wait(timeout=0):
            return None
        status = self._process.status()
        return "in a way that is not known" if status is None else exit_reason(status)

    def send(self, message: bytes, deadline: float) -> None:
        """Raises ``TimeoutError`` where it does not read, and ``PeerLostError`` where a rank has ended."""
        self._writer.send(message, deadline)

    def has_message(self) -> bool:
        """Whether it has sent something, be it a part of a message."""
        return self._reader.has_message()

    def receive(self, deadline: float) -> bytes:
        """Its next message, encoded. Raises as ``send``."""
        return self._reader.receive(deadline)

    def kill(self) -> None:
        """End it at once, and wait for its end."""
        self._process.kill()

    def ask_to_end(self, deadline: float) -> None:
        """Send ``Close``, or kill the process where it does not read it."""
        try:
            self.send(encoder.encode(Close()), deadline)
        except (TimeoutError, PeerLostError):  # it computes a long step, hangs, or is gone
            self._process.kill()

    def close(self, deadline: float) -> None:
        """Wait until the process has ended after ``ask_to_end``, or kill it at the deadline, and close its rings."""
        if not self._process.wait(max(0.0, deadline - time.monotonic())):
            self.kill()
        self._writer.close()
        self._reader.close()
        self._process.close()
        for ring in self._rings:
            ring.close()
