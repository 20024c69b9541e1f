"""The worker processes of one node, and their shared memory and rings."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, PenstockError

from .layout import RankInfo, rendezvous_file
from .messages import PeerSocket, Start
from .poller import Poller
from .rank_process import RankProcess
from .ring import Descriptors

RING_BYTES = 16 * 2**20
"""Capacity of a ring, bytes. Longer messages pass through it in parts."""
CLOSE_TIMEOUT = 5.0
"""Seconds after ``Close`` until workers that have not ended are killed."""
NO_LINKS: Mapping[int, Sequence[PeerSocket]] = {}


class LocalRanks:
    """Starts and ends the worker processes of this node's ranks.

    Args:
        logs: logging options of the workers; None: leave logging unconfigured.
        ranks: ranks of this node.
        links: connections to ranks on other nodes, by world rank. This process's copies of the sockets are closed.

    Raises ``PenstockError`` if ``cpu_binding`` does not match the number of ranks or this machine's cores, and for
    several ranks without compiled kernels.
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
        """Waits for all ranks' processes. The caller may add connections to other nodes."""
        self.processes: list[RankProcess] = []
        rings: dict[int, Descriptors] = {}
        """Rings from the previous pipeline stage on this node, by the receiver's world rank."""
        try:
            if ranks[0].world_size > 1:
                from penstock.ops.cores import check_cores, cores_of_rank  # this module imports PyTorch

                for info in ranks:
                    check_cores(cores_of_rank(options.cpu_binding, info.local_rank, info.local_size))
                try:
                    from penstock.parallel.shared_memory import create_memory
                except ImportError as error:
                    message = (
                        f"several ranks need the CPU kernels, which cannot be imported ({error}): install a compiler "
                        "(apt install g++), then install penstock again with pip's --no-cache-dir"
                    )
                    raise PenstockError(Code.UNSUPPORTED, message, "tensor_parallel_size", 1) from error
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
                ring.close()  # the workers have inherited the file descriptors
            for sockets in links.values():
                for each in sockets:
                    os.close(each.descriptor)

    def progress(self) -> list[tuple[int, int, int]]:
        """Progress of each rank in its current step, read from shared memory (``shared_memory.RankProgress``)."""
        if self._memory is None:
            return [(0, 0, 0)]
        from penstock.parallel.shared_memory import rank_progress

        return rank_progress(self._memory, [(info.stage, info.rank) for info in self._infos])

    def kill(self) -> None:
        """Kill all worker processes of this node."""
        for process in self.processes:
            process.kill()

    def close(self, send_close: bool = True, deadline: float | None = None) -> None:
        """End the processes, and close their rings and shared memory.

        Args:
            send_close: send ``Close`` first; False if the processes have received it already.
            deadline: time at which running processes are killed (monotonic clock); None: in ``CLOSE_TIMEOUT`` seconds.
        """
        deadline = time.monotonic() + CLOSE_TIMEOUT if deadline is None else deadline
        if send_close:
            for process in self.processes:
                process.send_close(deadline)
        for process in self.processes:
            process.close(deadline)
        self.processes.clear()
        if self._memory is not None:
            for stage in {info.stage for info in self._infos}:
                rendezvous_file(self._memory, os.getpid(), stage).unlink(missing_ok=True)
            os.close(self._memory)
            self._memory = None
