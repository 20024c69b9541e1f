"""Pausing an engine, and putting it to sleep, which frees its KV cache and weights."""

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
"""Sleep levels (``SleepManager.sleep``)."""
PAUSED = Failure(Code.UNAVAILABLE, "the request was aborted because the engine was paused; send it again later")


class SleepManager:
    """Pauses an engine and puts it to sleep. Not thread-safe: use it in the thread that runs the steps.

    Args:
        weights: reloads dropped weights at ``wake_up``.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, weights: WeightsManager) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._weights = weights
        self.asleep: set[str] = set()
        """Parts that are freed: ``weights``, ``kv_cache``."""
        self.is_paused = False
        """True if the engine computes no steps: it is paused or asleep."""
        self.cannot_reload_weights = False
        """True if the weights were loaded from a temporary folder: once dropped, they cannot be reloaded."""
        self._after_steps: Callable[[], None] | None = None
        """Remaining work of a pending ``pause`` or ``sleep``, called once no step is in flight."""
        self._pending: Future[None] | None = None
        """Result of the pending ``pause``, ``sleep`` or ``wake_up``."""
        self._waits_for_started = False
        """True if the pending call waits for the end of started sequences."""
        self._waking: set[str] = set()
        """Parts to restore by the pending ``wake_up``."""
        self._reloading: Future[str] | None = None
        """Pending load of the weights; with ``_committed``, pending commit of the loaded weights."""
        self._committed = False
        """True once the reloaded weights are being committed."""
        self._deltas: list[TokenDelta] = []
        """Last deltas of aborted requests, for the next ``poll``."""
        self.has_pending = False
        """True if ``poll`` has to be called."""

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None]:
        """Compute no steps until ``resume``; new requests wait in the queue. Returns a future that is done when the
        last step in flight is collected.

        Args:
            clear_cache: empty the prefix cache; ignored with mode ``keep``.
        """

        def after_steps() -> None:
            if clear_cache and mode != "keep":
                self._scheduler.device_pool.clear_cache()

        return self._stop(mode, after_steps)

    def resume(self) -> None:
        """Compute steps again after ``pause``. Raises ``PenstockError`` (``unavailable``) while the engine sleeps."""
        if self.asleep:
            raise PenstockError(Code.UNAVAILABLE, "the engine is asleep; wake it up first")
        if self._pending:
            self._finish(PenstockError(Code.CANCELLED, "the engine was resumed before the pause was complete"))
        self.is_paused = False
        self._scheduler.hold("pause", None)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None]:
        """Pause the engine and free memory. Returns a future that is done when the memory is free.

        Args:
            level: 0 only pauses. 1 frees the KV cache, and on a GPU also the weights, which ``wake_up`` reads again.
                2 frees KV cache and weights on any device.
        """
        if level not in LEVELS:
            raise invalid("level", f"must be 0, 1 or 2, is {level}")
        if not level:
            return self.pause(mode)
        if self._weights.is_changing:
            raise PenstockError(Code.UNAVAILABLE, "weights are being loaded; put the engine to sleep afterwards")

        def after_steps() -> None:
            if mode == "abort":  # some requests arrived while the last step was computed
                self._abort_all()
            self._scheduler.forget_kv()
            dropped = self._executor.run(FreeMemory(level))
            self.asleep |= {KV_CACHE, WEIGHTS} if dropped else {KV_CACHE}
            logger.info("the engine is asleep; freed %s", " and ".join(sorted(self.asleep)))

        return self._stop(mode, after_steps)

    def wake_up(self, tags: Collection[str] | None = None) -> Future[None]:
        """Restore what ``sleep`` has freed. Steps are computed again once all parts are restored.

        Args:
            tags: parts to restore: ``weights``, ``kv_cache``; None for both.

        Returns:
            A future that is done once the parts are restored. If a part cannot be restored, the future raises
            ``PenstockError``, and the engine remains asleep.

        Raises ``PenstockError`` for an unknown tag, while another call is pending, or if weights cannot be reloaded.
        """
        if unknown := set(tags or ()) - set(TAGS):
            raise invalid("tags", f"must be {' or '.join(TAGS)}, is {min(unknown)!r}")
        if self._pending:
            raise PenstockError(Code.UNAVAILABLE, "the engine is being paused or woken up; try again soon")
        waking = set(TAGS if tags is None else tags) & self.asleep
        if WEIGHTS in waking and self.cannot_reload_weights:
            if tags is None:
                message = "the dropped weights came from update_weights: call update_weights again, then wake_up"
                raise PenstockError(Code.UNAVAILABLE, message, "tags")
            waking.remove(WEIGHTS)  # update_weights restores them
        if WEIGHTS in waking:
            self._reloading, self._committed = self._weights.load(), False
        self._pending, self._waking, self.has_pending = Future(), waking, True
        return self._pending

    def on_weights(self) -> None:
        """Record that weights are in use again, after ``wake_up`` or a weight update."""
        if WEIGHTS in self.asleep:
            self.asleep.remove(WEIGHTS)
            self._resume_if_awake()

    def poll(self, num_in_flight: int) -> list[TokenDelta]:
        """Advance the pending call between two steps. Returns the last deltas of aborted requests. Raises
        ``WorkerLostError``."""
        if self._after_steps:
            if self._waits_for_started and not self._scheduler.has_started_sequences:
                self._waits_for_started = False
                self._scheduler.hold("pause", "all")
            if not self._waits_for_started and not num_in_flight:
                after_steps, self._after_steps = self._after_steps, None
                after_steps()
                self._finish()
        elif self._pending:
            self._wake()
        deltas, self._deltas, self.has_pending = self._deltas, [], self._pending is not None
        return deltas

    def _stop(self, mode: PauseMode, after_steps: Callable[[], None]) -> Future[None]:
        """Pause as ``mode`` says, and call ``after_steps`` once no step is in flight."""
        if self._pending:
            raise PenstockError(Code.UNAVAILABLE, "the engine is being paused or woken up; try again soon")
        if mode == "abort":
            self._abort_all()
        self.is_paused, self._waits_for_started = True, mode == "wait"
        self._scheduler.hold("pause", "new" if self._waits_for_started else "all")
        self._after_steps, self._pending, self.has_pending = after_steps, Future(), True
        return self._pending

    def _abort_all(self) -> None:
        """Abort all requests; ``poll`` returns their last deltas."""
        for request_id in self._scheduler.request_ids():
            self._deltas += self._scheduler.abort(request_id, PAUSED)

    def _wake(self) -> None:
        """Advance a pending ``wake_up``: reload the weights, commit them, then allocate the KV cache."""
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
        if KV_CACHE in self._waking & self.asleep:
            try:
                self._executor.run(AllocateCache())
            except WorkerLostError:
                raise
            except Exception as error:
                logger.error("the KV cache could not be allocated", exc_info=error)
                message = f"the KV cache could not be allocated ({error}); free memory, then wake the engine up again"
                self._finish(PenstockError(Code.UNAVAILABLE, message))
                return
            self.asleep.remove(KV_CACHE)
        self._resume_if_awake()
        self._finish()

    def _resume_if_awake(self) -> None:
        if self.is_paused and not self.asleep and not self._after_steps:
            self.is_paused = False
            self._scheduler.hold("pause", None)
            logger.info("the engine is awake")

    def _finish(self, error: BaseException | None = None) -> None:
        """Complete the pending call, with ``error`` if it failed."""
        pending, self._pending, self._after_steps = self._pending, None, None
        assert pending
        if error:
            pending.set_exception(error)
        else:
            pending.set_result(None)
