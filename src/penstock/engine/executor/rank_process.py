"""The executor's handle of a worker process on the same node."""

from __future__ import annotations

import time

from ..exit_status import exit_reason
from ..step import encoder
from .fork_server import fork_worker
from .messages import Close, Start
from .poller import PeerLostError, Poller
from .ring import Reader, Writer


class RankProcess:
    """Starts and controls the worker process of one rank, connected by two rings.

    Args:
        start: start message. This object takes ownership of ``inbox`` and ``outbox``.
        poller: poller shared by all ranks of the node.
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
        """Exit status; None if the process has not ended or the status is unknown."""
        return self._process.status() if self._process.wait(timeout=0) else None

    @property
    def end_reason(self) -> str | None:
        """Description of the process's end, for an error message; None if it has not ended."""
        if not self._process.wait(timeout=0):
            return None
        status = self._process.status()
        return "exit status unknown" if status is None else exit_reason(status)

    def send(self, message: bytes, deadline: float) -> None:
        """Send an encoded message. Raises ``TimeoutError`` if the process does not read it by the deadline, and
        ``PeerLostError`` if a rank has ended."""
        self._writer.send(message, deadline)

    def has_message(self) -> bool:
        """True if at least a part of a message has arrived."""
        return self._reader.has_message()

    def receive(self, deadline: float) -> bytes:
        """Wait for the next message, encoded. Raises ``TimeoutError`` and ``PeerLostError``."""
        return self._reader.receive(deadline)

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._process.kill()

    def send_close(self, deadline: float) -> None:
        """Send ``Close``. Kills the process if it does not read the message by the deadline (monotonic clock)."""
        try:
            self.send(encoder.encode(Close()), deadline)
        except (TimeoutError, PeerLostError):  # the process computes a long step, hangs, or has ended
            self._process.kill()

    def close(self, deadline: float) -> None:
        """Wait for the end of the process after ``send_close``, kill it at the deadline, and close its rings."""
        if not self._process.wait(max(0.0, deadline - time.monotonic())):
            self.kill()
        self._writer.close()
        self._reader.close()
        self._process.close()
        for ring in self._rings:
            ring.close()
