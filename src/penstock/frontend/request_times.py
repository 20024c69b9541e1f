"""Times of a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestTimes:
    """Times of a request: points on the monotonic clock and durations, in seconds."""

    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    queued: float = 0.0
    """Duration from arrival to the first step."""
    sent: float | None = None
    """Time at which the request was sent to the engine."""
    detokenizing: float = 0.0
    """Duration of detokenization; traced requests only."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request under vLLM's names, in seconds. Names with ``_ts`` are on the monotonic clock, names with
    ``_time`` (except ``time_in_queue``) are Unix timestamps. None: not reached yet."""

    arrival_time: float
    queued_ts: float
    """Arrival."""
    scheduled_ts: float
    """First step."""
    first_token_ts: float | None
    last_token_ts: float | None
    first_token_latency: float | None
    """Duration from arrival to the first token."""
    num_generation_tokens: int
    """Number of generated tokens of all sequences."""
    time_in_queue: float
    """Duration from arrival to the first step."""
    first_scheduled_time: float
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    """``last_token_time`` of a finished request."""

    @classmethod
    def of(cls, times: RequestTimes, num_tokens: int, finished: bool) -> RequestMetrics:
        """Convert the times of a request that has generated ``num_tokens`` tokens."""
        first, last, offset = times.first_token, times.last_token, time.time() - time.monotonic()
        last_time = None if last is None else last + offset
        return cls(
            arrival_time=times.arrived + offset,
            queued_ts=times.arrived,
            scheduled_ts=times.arrived + times.queued,
            first_token_ts=first,
            last_token_ts=last,
            first_token_latency=None if first is None else first - times.arrived,
            num_generation_tokens=num_tokens,
            time_in_queue=times.queued,
            first_scheduled_time=times.arrived + times.queued + offset,
            first_token_time=None if first is None else first + offset,
            last_token_time=last_time,
            finished_time=last_time if finished else None,
        )
