"""The worker processes of one node, and what they share there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, PenstockError

from .layout import RankInfo, meeting_point
from .messages import PeerSocket, Start
from .poller import Poller
from .rank_process import RankProcess
from .ring import Descriptors

RING_BYTES = 16 * 2**20
"""Capacity of a ring. Longer messages are passed on in parts."""
CLOSE_TIMEOUT = 5.0
"""Seconds that workers have to end after ``Close`` before they are killed."""
NO_LINKS: Mapping[int, Sequence[PeerSocket]] = {}


class LocalRanks:
    """Starts the processes.

    Args:
        logs: how the workers set up their logs; None leaves logging alone.
        ranks: of this node.
        links: connections to ranks of other nodes, by world rank. The sockets are closed here in any case.

    Raises ``PenstockError`` where ``cpu_binding`` is not for so many ranks or these cores, and where several ranks have
    no compiled kernels.
    """

    def __init__(
        self,
        options: EngineOptions,
        logs: LogOptions | None,
        ranks: Sequence[RankInfo],
        links: Mapping[int, Sequence[PeerSocket]] = NO_LINKS,
    ) -> None:
        self._infos = ranks
        self._memory: int | None = None
        self.poller = Poller()
        """Of all ranks' processes. Connections to other nodes may be added."""
        self.processes: list[RankProcess] = []
        rings: dict[int, Descriptors] = {}
        """From the stage before, by world rank; for ranks whose stage before is on this node, too."""
        try:
            if ranks[0].world_size > 1:
                from penstock.ops.cores import check_cores, cores_of_rank  # which brings PyTorch

                for info in ranks:
                    check_cores(cores_of_rank(options.cpu_binding, info.local_rank, info.local_size))
                try:
                    from penstock.parallel.shared_memory import create_memory
                except ImportError as error:
                    words = (
                        f"several ranks need the CPU kernels, which cannot be used here ({error}): install a compiler "
                    )
                    words += "(apt install g++), then penstock again, with pip's --no-cache-dir"
                    raise PenstockError(Code.UNSUPPORTED, words, "tensor_parallel_size", 1) from error
                self._memory = create_memory(ranks[0].stages)
            for info in ranks:
                if any(other.precedes(info) for other in ranks):
                    rings[info.world_rank] = Descriptors.create(RING_BYTES)
            for info in ranks:
                following = next((rings[other.world_rank] for other in ranks if info.precedes(other)), None)
                start = Start(
                    options,
                    logs,
                    inbox=Descriptors.create(RING_BYTES),
                    outbox=Descriptors.create(RING_BYTES),
                    parent=os.getpid(),
                    rank_info=info,
                    memory=self._memory,
                    previous=rings.get(info.world_rank),
                    following=following,
                    sockets=tuple(links.get(info.world_rank, ())),
                )
                self.processes.append(RankProcess(start, self.poller))
        except BaseException:
            self.close()
            raise
        finally:
            for ring in rings.values():
                ring.close()  # the workers have them
            for each in [each for of_rank in links.values() for each in of_rank]:
                os.close(each.descriptor)

    def places(self) -> list[tuple[int, int, int]]:
        """How far each rank has come (``penstock.parallel.shared_memory.RankProgress``)."""
        if self._memory is None:
            return [(0, 0, 0)]
        from penstock.parallel.shared_memory import rank_progress

        return rank_progress(self._memory, [(info.stage, info.rank) for info in self._infos])

    def kill(self) -> None:
        """End all processes at once."""
        for process in self.processes:
            process.kill()

    def close(self, ask: bool = True, deadline: float | None = None) -> None:
        """End the processes, and close what they share.

        Args:
            ask: send them ``Close``; else they have it.
            deadline: until which they have time to end; None gives them ``CLOSE_TIMEOUT``.
        """
        deadline = time.monotonic() + CLOSE_TIMEOUT if deadline is None else deadline
        if ask:
            for process in self.processes:
                process.ask_to_end(deadline)
        for process in self.processes:
            process.close(deadline)
        self.processes.clear()
        if self._memory is not None:
            for stage in {info.stage for info in self._infos}:
                meeting_point(self._memory, os.getpid(), stage).unlink(missing_ok=True)
            os.close(self._memory)
            self._memory = None
