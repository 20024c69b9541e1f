"""The measurements of one request."""

from __future__ import annotations

from array import array
from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """The outcome of a request."""

    OK = "ok"
    REFUSED = "refused"  # 429 or 503: the server is full and says so
    FAILED = "failed"


class Sample(msgspec.Struct):
    """The measurements of one request. Times are in seconds since the load began."""

    input_tokens: int
    due: float = 0.0
    """When it was to be sent: its arrival or, if later, the moment it had a slot."""
    sent: float = 0.0
    chunks: array[float] = msgspec.field(default_factory=lambda: array("d"))
    """Times of the chunks with text; a chunk may hold several tokens."""
    last: float = 0.0
    """Time of the end or the failure."""
    output_tokens: int = 0
    cached_tokens: int = 0
    counted: bool = False
    """Whether the server reported token counts; otherwise each chunk counts as one."""
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
