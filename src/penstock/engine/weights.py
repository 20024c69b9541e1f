"""Weights that change while the engine serves: loaded beside those in use, checked on all ranks, swapped between steps.

    load ──► the workers read and pack them, while steps go on ──► loaded ──► commit ──► no sequence of the old weights
    is left ──► swap on all ranks ──► the old ones are dropped

Whatever fails before all ranks have swapped leaves the old weights in use.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from penstock.core import Code, PenstockError

from .executor.base import Executor, WorkerLostError
from .modes import Running
from .scheduling.scheduler import Scheduler
from .step import ChangeWeights, LoadWeights

logger = logging.getLogger(__name__)

BUSY = "other weights are being loaded; wait until they are in use"


class WeightsManager:
    """Changes the weights of an engine. Use it in the thread that runs the steps.

    Args:
        path: folder of the weights in use; empty for the model's.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, path: str = "") -> None:
        self._executor = executor
        self._scheduler = scheduler
        self.path = path
        """Folder of the weights in use; empty for the model's."""
        self.num_updates = 0
        """Number of times that the weights were changed since the start."""
        self._path = ""
        """Of those that are loaded or being loaded."""
        self._reading: Future[Any] | None = None
        """The workers' answer, the version."""
        self._unwanted = False
        """True if these are to be dropped once they are read."""
        self._loaded: Future[str] | None = None
        """The result of ``load``, until they are swapped or dropped."""
        self._swapped: Future[str] | None = None
        """The result of ``commit``, until they are swapped."""
        self._running: Running = "finish"
        self.has_pending = False
        """True if ``poll`` has to be called."""

    @property
    def reading(self) -> list[Future[Any]]:
        """The workers' answer that is waited for, if there is one."""
        return [self._reading] if self._reading else []

    @property
    def is_changing(self) -> bool:
        """True if weights are loaded or being loaded beside those in use."""
        return self._loaded is not None

    def load(self, path: str = "") -> Future[str]:
        """Start to load weights beside those in use.

        Args:
            path: folder of a checkpoint of the same model; empty is the one whose weights are in use.

        Returns:
            Their version, once all ranks have them; ``commit`` or ``discard`` has to follow. ``PenstockError`` if a
            rank cannot load them; then nothing has changed.

        Raises ``PenstockError`` if there is no room for them, or others are loaded.
        """
        if self._loaded:
            raise PenstockError(Code.UNAVAILABLE, BUSY)
        self._path = path or self.path
        self._reading = self._executor.call(LoadWeights(self._path))
        self._loaded, self.has_pending = Future(), True
        return self._loaded

    def commit(self, running: Running = "finish") -> Future[str]:
        """Use the weights that were loaded, as soon as no sequence needs the others; new sequences wait until then.
        While the engine is paused, running sequences are recomputed.

        Returns:
            Their version, once they are in use.
        """
        assert self._loaded, "load them first"
        self._swapped, self._running, self.has_pending = Future(), running, True
        self._scheduler.hold("weights", "new" if running == "finish" else "all")
        return self._swapped

    def discard(self) -> None:
        """Drop weights that were loaded, or are being loaded, and not committed."""
        if self._reading:
            self._unwanted = True
        elif self._loaded and not self._swapped:
            self._drop()

    def poll(self, num_in_flight: int) -> str | None:
        """Go on with what is pending, between two steps. Returns the version of the weights if others are in use
        from now on. Raises ``WorkerLostError``."""
        if self._reading:
            self._executor.poll()
            if self._reading.done():
                self._finish_reading()
        version = None
        if self._swapped and not num_in_flight and self._is_free():
            version = self._swap(self._swapped)
        self.has_pending = self._reading is not None or self._swapped is not None
        return version

    def _finish_reading(self) -> None:
        reading, loaded = self._reading, self._loaded
        assert reading
        assert loaded
        unwanted, self._unwanted, self._reading = self._unwanted, False, None
        error = PenstockError(Code.CANCELLED, "the weights were dropped") if unwanted else reading.exception()
        if error:
            self._drop()
            loaded.set_exception(_shown(error, "loaded"))
        else:
            loaded.set_result(reading.result())

    def _is_free(self) -> bool:
        """True if no sequence has KV of the weights in use; sequences are preempted if they are to be recomputed."""
        waits = self._running == "finish" and not self._scheduler.is_held
        if waits and self._scheduler.has_started_sequences:
            return False
        self._scheduler.recompute_all()
        return True

    def _swap(self, swapped: Future[str]) -> str | None:
        """Swap the weights; returns the version of the new ones, None if it fails."""
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
            swapped.set_exception(_shown(error, "used"))
            return None
        self._executor.run(ChangeWeights("commit"))
        self.path, self._loaded = self._path, None
        self.num_updates += 1
        self._scheduler.set_weights(version)
        self._scheduler.hold("weights", None)
        logger.info("the weights of %s are in use, version %s", self._path or "the model's folder", version[:16])
        swapped.set_result(version)
        return version

    def _drop(self) -> None:
        self._loaded = None
        self._executor.run(ChangeWeights("revert"))


def _shown(error: BaseException, done: str) -> PenstockError | WorkerLostError:
    """The error for who asked; what is no ``PenstockError`` is logged."""
    if isinstance(error, PenstockError | WorkerLostError):
        return error
    logger.error("weights could not be %s", done, exc_info=error)
    return PenstockError(Code.INTERNAL, f"the weights could not be {done} ({error}); the log says why")
