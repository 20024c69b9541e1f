"""Weight updates while the engine serves: new weights are loaded next to the old ones, and swapped in between steps.

    load ──► workers read and pack the new weights, while steps continue ──► commit ──► wait until no sequence has KV
    of the old weights ──► swap on all ranks ──► drop the old weights

Until all ranks have swapped, any error leaves the old weights in use.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from penstock.core import Code, PenstockError

from .executor.base import Executor, WorkerLostError
from .modes import WeightUpdateMode
from .scheduling.scheduler import Scheduler
from .step import ChangeWeights, LoadWeights

logger = logging.getLogger(__name__)

BUSY = "other weights are being loaded; wait until they are in use"


class WeightsManager:
    """Updates the weights of an engine. Not thread-safe: use it in the thread that runs the steps.

    Args:
        path: folder of the weights in use; empty for the model's folder.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, path: str = "") -> None:
        self._executor = executor
        self._scheduler = scheduler
        self.path = path
        """Folder of the weights in use; empty for the model's folder."""
        self.num_updates = 0
        """Number of weight updates since the start."""
        self._path = ""
        """Folder of the new weights, while they are loaded and not in use."""
        self._reading: Future[Any] | None = None
        """Pending reply of the workers to ``LoadWeights``: the version of the new weights."""
        self._discarded = False
        """True if ``discard`` was called while the new weights are being read: they are dropped afterwards."""
        self._loaded: Future[str] | None = None
        """Result of ``load``, until the new weights are swapped in or dropped."""
        self._swapped: Future[str] | None = None
        """Result of ``commit``, until the new weights are swapped in."""
        self._running: WeightUpdateMode = "finish"
        """Mode of the pending ``commit``."""
        self.has_pending = False
        """True if ``poll`` has to be called."""

    @property
    def reading(self) -> list[Future[Any]]:
        """Pending replies of the workers to ``LoadWeights``, at most one."""
        return [self._reading] if self._reading else []

    @property
    def is_changing(self) -> bool:
        """True if new weights are loaded or being loaded."""
        return self._loaded is not None

    def load(self, path: str = "") -> Future[str]:
        """Start to load new weights.

        Args:
            path: folder of a checkpoint of the same model; empty for the folder of the weights in use.

        Returns:
            A future of the new weights' version, done once all ranks have loaded them; then call ``commit`` or
            ``discard``. If a rank cannot load them, the future raises ``PenstockError``, and nothing has changed.

        Raises ``PenstockError`` (``unavailable``) if other weights are being loaded.
        """
        if self._loaded:
            raise PenstockError(Code.UNAVAILABLE, BUSY)
        self._path = path or self.path
        self._reading = self._executor.call(LoadWeights(self._path))
        self._loaded, self.has_pending = Future(), True
        return self._loaded

    def commit(self, running: WeightUpdateMode = "finish") -> Future[str]:
        """Use the new weights as soon as no sequence needs the old ones; new sequences wait until then. Returns a
        future of the new weights' version, done once they are in use.

        Args:
            running: how running sequences are handled. While the engine is paused, they are always recomputed.
        """
        assert self._loaded, "load weights first"
        self._swapped, self._running, self.has_pending = Future(), running, True
        self._scheduler.hold("weights", "new" if running == "finish" else "all")
        return self._swapped

    def discard(self) -> None:
        """Drop new weights that are loaded or being loaded, unless they are committed."""
        if self._reading:
            self._discarded = True
        elif self._loaded and not self._swapped:
            self._drop()

    def poll(self, num_in_flight: int) -> str | None:
        """Advance a pending update between two steps. Returns the version of the new weights if they were swapped in.
        Raises ``WorkerLostError``."""
        if self._reading:
            self._executor.poll()
            if self._reading.done():
                self._finish_reading()
        version = None
        if self._swapped and not num_in_flight and self._release_kv():
            version = self._swap(self._swapped)
        self.has_pending = self._reading is not None or self._swapped is not None
        return version

    def _finish_reading(self) -> None:
        """Complete ``load`` after the reply of the workers."""
        reading, loaded = self._reading, self._loaded
        assert reading
        assert loaded
        discarded, self._discarded, self._reading = self._discarded, False, None
        error = PenstockError(Code.CANCELLED, "the new weights were discarded") if discarded else reading.exception()
        if error:
            self._drop()
            loaded.set_exception(_public_error(error, "loaded"))
        else:
            loaded.set_result(reading.result())

    def _release_kv(self) -> bool:
        """Release all KV of the old weights by preempting the running sequences. In mode ``finish``, returns False
        until the started sequences have finished."""
        waits = self._running == "finish" and not self._scheduler.is_held
        if waits and self._scheduler.has_started_sequences:
            return False
        self._scheduler.recompute_all()
        return True

    def _swap(self, swapped: Future[str]) -> str | None:
        """Swap in the new weights. Returns their version, or None if the workers cannot use them."""
        assert self._loaded
        version = self._loaded.result()
        self._swapped = None
        try:
            self._executor.run(ChangeWeights("swap"))
        except WorkerLostError:
            raise
        except Exception as error:
            self._drop()
            self._scheduler.hold("weights", None)
            swapped.set_exception(_public_error(error, "used"))
            return None
        self._executor.run(ChangeWeights("commit"))
        self.path, self._loaded = self._path, None
        self.num_updates += 1
        self._scheduler.set_weights(version)
        self._scheduler.hold("weights", None)
        logger.info("weights from %s are in use, version %s", self._path or "the model's folder", version[:16])
        swapped.set_result(version)
        return version

    def _drop(self) -> None:
        """Drop the new weights, and use the old ones."""
        self._loaded = None
        self._executor.run(ChangeWeights("revert"))


def _public_error(error: BaseException, done: str) -> PenstockError | WorkerLostError:
    """Error for the caller. An unexpected error is logged, and replaced by a ``PenstockError``.

    Args:
        done: failed operation as a participle, for the message: ``loaded``, ``used``.
    """
    if isinstance(error, PenstockError | WorkerLostError):
        return error
    logger.error("weights could not be %s", done, exc_info=error)
    return PenstockError(Code.INTERNAL, f"the weights could not be {done} ({error}); see the server's log")
