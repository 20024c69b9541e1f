"""The record of one request: its id, and data for the request log and the error handlers."""

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
"""Key in the scope of a request that was rejected before it reached the application; the value is ``Refused``."""


class Refused(NamedTuple):
    """Reason why a request's head was rejected."""

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
    """Time of arrival on the monotonic clock, in seconds."""
    log_fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the request's log line: token counts, times in seconds."""
    address: str = ""
    """Client address without the port."""
    client: str = ""
    """Identifier of the gRPC connection; a request may stop other requests of the same connection."""
    tenant: str = ""
    """Name derived from the API key; empty unless the server has several keys. A request can see and stop only data and
    requests of its tenant."""
    has_key: bool = False
    """True if the request has a valid API key."""
    may_control: bool = True
    """True if the request may change the server for all clients."""
    failure: Failure | None = None
    """Error of the request, also if the client disconnected before the error was sent."""
    error_format: ErrorFormat | None = None
    """Error format of the request's dialect; None: the dialect is not known yet."""
    weights_version: str = ""
    """Version of the weights that computed the first output tokens."""
    tool_levels: dict[str, str] = field(default_factory=dict)
    """Level of constraint by name of the tools whose calls are less constrained than requested; ``*``: all tools."""
    unknown: UnknownFields = field(default_factory=UnknownFields)
    """Fields of the request that its schema does not have."""
    num_truncated: int = 0
    """Number of prompt tokens that were removed, as the request or the dialect truncates prompts."""
    memory: Reservation | None = None
    """Reserved memory for the body; None: the body is small."""
    span: Span | None = None
    """Trace span; None if tracing is off."""
    changed_engines: dict[str, None] = field(default_factory=dict)
    """Ordered set of the engines on which the request continues although their results may differ
    (``Resume.changed_engine``)."""
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """Output so far of each prompt, by index."""

    calls_tools: bool = False
    """True while tools of MCP servers are called, and the model is not run."""

    @property
    def is_waiting(self) -> bool:
        """True while a prompt waits to continue after the loss of its engine, or tools are called."""
        return self.calls_tools or any(output.is_waiting for output in self.outputs.values())

    @property
    def sender(self) -> str:
        """Client for fair scheduling and memory shares: the tenant if set, otherwise the address."""
        return self.tenant or self.address

    def shrink_memory(self, size: int) -> None:
        """Free the reserved memory beyond ``size`` bytes, when the body itself is no longer needed."""
        if self.memory and size < self.memory.size:
            self.memory.resize(size)

    def release_memory(self) -> None:
        """Free the reserved memory at the end of the request."""
        if self.memory:
            self.memory.release()

    def add_output(self, output: RequestOutput) -> None:
        """Add counts and times of a finished prompt to the log fields: the sum of counts, the maximum of times."""
        times, fields = output.times, self.log_fields
        counts = {
            "prompt": len(output.prompt_token_ids),
            "cached": output.num_cached_tokens,
            "output": sum(len(completion.token_ids) for completion in output.outputs),
        }
        for name, count in counts.items():
            fields[name] = fields.get(name, 0) + count
        if times.first_token is not None and times.last_token is not None:
            seconds = {"queue": times.queued, "ttft": times.first_token - times.arrived}
            for name, value in (seconds | {"e2e": times.last_token - times.arrived}).items():
                fields[name] = max(fields.get(name, 0.0), value)
        fields["finish"] = output.outputs[0].finish_reason


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope["penstock.record"]
    return record
