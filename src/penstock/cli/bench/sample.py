"""Measurements of a request."""

from __future__ import annotations

from array import array
from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """Outcome of a request."""

    OK = "ok"
    REFUSED = "refused"  # status 429 or 503: the server is full
    FAILED = "failed"


class Sample(msgspec.Struct):
    """Measurements of a request. Times are in seconds since the start of the load."""

    input_tokens: int
    arrival: float = 0.0
    """Scheduled arrival of the request."""
    due: float = 0.0
    """Scheduled time of sending: the request's arrival, or when concurrency allows it."""
    sent: float = 0.0
    chunks: array[float] = msgspec.field(default_factory=lambda: array("d"))
    """Times of chunks with text; a chunk may have several tokens."""
    last: float = 0.0
    """Time at which the response ended or failed."""
    output_tokens: int = 0
    cached_tokens: int = 0
    counted: bool = False
    """True if the server reported token counts; otherwise each chunk counts as one token."""
    outcome: Outcome = Outcome.FAILED
    reason: str = ""
    text: list[str] | None = None
    """Parts of the output, if they are kept."""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.chunks[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for a single token."""
        return (self.last - self.chunks[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the response."""
        return self.last - self.sent

    @property
    def client_queue_time(self) -> float:
        """Seconds from the arrival to sending, which a request waits if ``max_concurrency`` others are running."""
        return self.sent - self.arrival

    @property
    def e2el_including_client_queue(self) -> float:
        """Seconds from the arrival to the end of the response."""
        return self.last - self.arrival
