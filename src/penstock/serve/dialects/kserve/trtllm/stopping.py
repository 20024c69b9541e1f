"""Stopping of a running request by another request (TensorRT-LLM's input ``stop``)."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class StoppableRequest:
    """A running request that can be stopped. Create the object in the task that computes the request."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._stopped = False

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._task.cancel()

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Leave the ``with`` block when the request is stopped. Other cancellations are propagated."""
        try:
            yield
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            self._task.uncancel()


class RunningRequests:
    """The running requests, found by client and request id."""

    def __init__(self) -> None:
        self._requests: dict[tuple[Hashable, str], list[StoppableRequest]] = {}

    @contextmanager
    def track(self, client: Hashable, name: str) -> Iterator[StoppableRequest]:
        stoppable = StoppableRequest()
        others = self._requests.setdefault((client, name), [])
        others.append(stoppable)
        try:
            yield stoppable
        finally:
            others.remove(stoppable)
            if not others:
                del self._requests[client, name]

    def stop(self, client: Hashable, name: str) -> None:
        """Stop all requests of a client with the request id ``name``."""
        for stoppable in self._requests.get((client, name), ()):
            stoppable.stop()
