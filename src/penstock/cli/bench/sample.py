"""What was seen of one request, and the latencies that follow from it."""

from __future__ import annotations

from array import array
from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"  # 429 or 503: the server is full and says so
    FAILED = "failed"


class Sample(msgspec.Struct):
    """One request as its client saw it. Moments are in seconds since the load began."""

    input_tokens: int
    due: float = 0.0
    """When it was to be sent: its arrival or, if later, the moment it had a slot."""
    sent: float = 0.0
    chunks: array[float] = msgspec.field(default_factory=lambda: array("d"))
    """When text came. A chunk may hold several tokens."""
    last: float = 0.0
    """When the answer was complete, or its failure known."""
    output_tokens: int = 0
    cached_tokens: int = 0
    counted: bool = False
    """Whether the server told its count of tokens; if not, each chunk is taken for one."""
    outcome: Outcome = Outcome.FAILED
    reason: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.chunks[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds for each further token; 0 where there is none."""
        return (self.last - self.chunks[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.last - self.sent
