"""The record of one request: its id, and what the request log and the error handlers need."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.types import Scope

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput

from .body_memory import Reservation
from .error_format import ErrorFormat
from .unknown_fields import UnknownFields

if TYPE_CHECKING:
    from penstock.tracing import Span


REFUSED = "penstock.refused"
"""Key of the scope of a request that is refused before it reaches the application: its ``Refused``."""


class Refused(NamedTuple):
    """Why a request's head is refused."""

    failure: Failure
    status: int
    """HTTP status."""


@dataclass(slots=True)
class RequestRecord:
    """One request, over HTTP or gRPC."""

    request_id: str
    path: str = ""
    """Path of the URL."""
    arrived: float = field(default_factory=time.monotonic)
    """Time of arrival, seconds on the monotonic clock."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of its line in the log: token counts; times in seconds."""
    address: str = ""
    """Its client's address, without the port."""
    client: str = ""
    """Its connection (gRPC), within which one request may stop another."""
    tenant: str = ""
    """Where there are several API keys, a name made of its own: what it may see and stop is its tenant's."""
    has_key: bool = False
    """Whether it has a valid API key."""
    may_control: bool = True
    """Whether it may change the server for all clients."""
    failure: Failure | None = None
    """The error that was sent to the client, or would have been had it not disconnected."""
    error_format: ErrorFormat | None = None
    """The error format of its dialect, once the dialect is known."""
    weights_version: str = ""
    """Version of the weights that its first tokens were computed with."""
    unknown: UnknownFields = field(default_factory=UnknownFields)
    """Its fields that the schema does not have."""
    memory: Reservation | None = None
    """Memory of its body; None where it is small."""
    span: Span | None = None
    """Its span; None without traces."""

    @property
    def sender(self) -> str:
        """Whose turn it takes and whose share of memory: its tenant, or else its client's address."""
        return self.tenant or self.address

    def shrink_memory(self, size: int) -> None:
        """Free the memory beyond ``size`` bytes, as the body itself is kept no longer."""
        if self.memory and size < self.memory.size:
            self.memory.resize(size)

    def release_memory(self) -> None:
        """Free the memory of its body, as it has ended."""
        if self.memory:
            self.memory.release()

    def add_output(self, output: RequestOutput) -> None:
        """Add the counts and times of one finished prompt: counts add up, of times the longest counts."""
        times, facts = output.times, self.facts
        counts = {
            "prompt": len(output.prompt_token_ids),
            "cached": output.num_cached_tokens,
            "output": sum(len(completion.token_ids) for completion in output.outputs),
        }
        for name, count in counts.items():
            facts[name] = facts.get(name, 0) + count
        if times.first_token is not None and times.last_token is not None:
            spans = {"queue": times.queued, "ttft": times.first_token - times.arrived}
            for name, span in (spans | {"e2e": times.last_token - times.arrived}).items():
                facts[name] = max(facts.get(name, 0.0), span)
        facts["finish"] = output.outputs[0].finish_reason


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope["penstock.record"]
    return record
