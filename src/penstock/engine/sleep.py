"""Pausing an engine, and putting it to sleep: without its KV cache, and without its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future

from penstock.core import Code, Failure, PenstockError, TokenDelta
from penstock.core.errors import invalid

from .executor.base import Executor, WorkerLostError
from .modes import KV_CACHE, TAGS, WEIGHTS, PauseMode
from .scheduling.scheduler import Scheduler
from .step import AllocateCache, FreeMemory
from .weights import WeightsManager

logger = logging.getLogger(__name__)

LEVELS = (0, 1, 2)
PAUSED = Failure(Code.UNAVAILABLE, "the engine was paused, and open requests were aborted; send it again later")


class SleepManager:
    """Pauses an engine and puts it to sleep. Use it in the thread that runs the steps.

    Args:
        weights: reloads weights that were dropped.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, weights: WeightsManager) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._weights = weights
        self.asleep: set[str] = set()
        """Parts that were freed: ``weights``, ``kv_cache``."""
        self.is_paused = False
        """True if the engine computes no steps, as it was paused or sleeps."""
        self.forgets_weights = False
        """True if weights that are dropped cannot be read again, as the folder that they came from is gone."""
        self._then: Callable[[], None] | None = None
        """What is to be done once no step is in flight."""
        self._done: Future[None] | None = None
        """The result of the call that is pending."""
        self._waits = False
        """True if sequences that have begun are waited for."""
        self._wanted: set[str] = set()
        """Parts that are being brought back."""
        self._reloading: Future[str] | None = None
        """Weights that are being read again, then that they are in use."""
        self._committed = False
        self._deltas: list[TokenDelta] = []
        self.has_pending = False
        """True if ``poll`` has to be called."""

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None]:
        """Compute no steps until ``resume``; requests that come wait in the queue.

        Args:
            clear_cache: empty the prefix cache, unless requests are kept.

        Returns:
            A future that is done when no step is computed any more.
        """

        def then() -> None:
            if clear_cache and mode != "keep":
                self._scheduler.device_pool.clear_cache()

        return self._stop(mode, then)

    def resume(self) -> None:
        """Compute steps again after ``pause``. Raises ``PenstockError`` (``unavailable``) while the engine sleeps."""
        if self.asleep:
            raise PenstockError(Code.UNAVAILABLE, "the engine sleeps; wake it up first")
        if self._done:
            self._finish(PenstockError(Code.CANCELLED, "the engine was resumed before it was paused"))
        self.is_paused = False
        self._scheduler.hold("pause", None)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None]:
        """Pause the engine, then free its KV cache, and with level 2 its weights. Level 1 keeps weights on a CPU, and
        drops those on a GPU, to be read again; level 0 is ``pause``.

        Returns:
            A future that is done when the memory is free.
        """
        if level not in LEVELS:
            raise invalid("level", f"is one of 0, 1 and 2, not {level}")
        if not level:
            return self.pause(mode)
        if self._weights.is_changing:
            raise PenstockError(Code.UNAVAILABLE, "weights are being loaded; put it to sleep afterwards")

        def then() -> None:
            if mode == "abort":  # what has come while the last step was computed
                self._abort_all()
            self._scheduler.forget_kv()
            dropped = self._executor.run(FreeMemory(level))
            self.asleep |= {KV_CACHE, WEIGHTS} if dropped else {KV_CACHE}
            logger.info("asleep, without %s", " and ".join(sorted(self.asleep)))

        return self._stop(mode, then)

    def wake_up(self, tags: Collection[str] | None = None) -> Future[None]:
        """Bring back what ``sleep`` has freed. Once nothing is missing, requests are computed again.

        Args:
            tags: ``weights``, ``kv_cache``; None is both.

        Returns:
            A future that is done once they are there. ``PenstockError`` if weights cannot be read again; the engine
            sleeps on.

        Raises ``PenstockError`` if that is impossible.
        """
        if unknown := set(tags or ()) - set(TAGS):
            raise invalid("tags", f"{min(unknown)!r} is none of {' and '.join(TAGS)}")
        if self._done:
            raise PenstockError(Code.UNAVAILABLE, "the engine is being paused or woken up; try again soon")
        wanted = set(TAGS if tags is None else tags) & self.asleep
        if WEIGHTS in wanted and self.forgets_weights:
            if tags is None:
                message = (
                    "the weights in use were given by update_weights and are dropped: give weights, then wake it up"
                )
                raise PenstockError(Code.UNAVAILABLE, message, "tags")
            wanted.remove(WEIGHTS)  # update_weights brings them
        if WEIGHTS in wanted:
            self._reloading, self._committed = self._weights.load(), False
        self._done, self._wanted, self.has_pending = Future(), wanted, True
        return self._done

    def on_weights(self) -> None:
        """Weights were loaded, whoever asked for it."""
        if WEIGHTS in self.asleep:
            self.asleep.remove(WEIGHTS)
            self._resume_if_awake()

    def poll(self, num_in_flight: int) -> list[TokenDelta]:
        """Go on with what is pending, between two steps. Returns the last deltas of aborted requests. Raises
        ``WorkerLostError``."""
        if self._then:
            if self._waits and not self._scheduler.has_started_sequences:
                self._waits = False
                self._scheduler.hold("pause", "all")
            if not self._waits and not num_in_flight:
                then, self._then = self._then, None
                then()
                self._finish()
        elif self._done:
            self._wake()
        deltas, self._deltas, self.has_pending = self._deltas, [], self._done is not None
        return deltas

    def _stop(self, mode: PauseMode, then: Callable[[], None]) -> Future[None]:
        if self._done:
            raise PenstockError(Code.UNAVAILABLE, "the engine is being paused or woken up; try again soon")
        if mode == "abort":
            self._abort_all()
        self.is_paused, self._waits = True, mode == "wait"
        self._scheduler.hold("pause", "new" if self._waits else "all")
        self._then, self._done, self.has_pending = then, Future(), True
        return self._done

    def _abort_all(self) -> None:
        for request_id in self._scheduler.request_ids():
            self._deltas += self._scheduler.abort(request_id, PAUSED)

    def _wake(self) -> None:
        if self._reloading:
            if not self._reloading.done():
                return
            reloading, self._reloading = self._reloading, None
            if error := reloading.exception():
                self._finish(error)
                return
            if not self._committed:
                self._reloading, self._committed = self._weights.commit("recompute"), True
                return
        if KV_CACHE in self._wanted & self.asleep:
            try:
                self._executor.run(AllocateCache())
            except WorkerLostError:
                raise
            except Exception as error:
                logger.error("the KV cache could not be allocated again", exc_info=error)
                message = f"the KV cache could not be allocated again ({error}); free memory, then wake it up again"
                self._finish(PenstockError(Code.UNAVAILABLE, message))
                return
            self.asleep.remove(KV_CACHE)
        self._resume_if_awake()
        self._finish()

    def _resume_if_awake(self) -> None:
        if self.is_paused and not self.asleep and not self._then:
            self.is_paused = False
            self._scheduler.hold("pause", None)
            logger.info("awake")

    def _finish(self, error: BaseException | None = None) -> None:
        done, self._done, self._then = self._done, None, None
        assert done
        if error:
            done.set_exception(error)
        else:
            done.set_result(None)
