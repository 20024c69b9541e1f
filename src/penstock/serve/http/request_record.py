"""The record of one request: its id, and what the request log and the error handlers need."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.types import Scope

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput

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
    span: Span | None = None
    """Its span; None without traces."""

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
