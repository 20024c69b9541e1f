"""What is known of one HTTP request, for its line in the log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from penstock.core import Failure
from penstock.frontend.outputs import RequestOutput

from .error_format import ErrorFormat
from .unknown_fields import UnknownFields


@dataclass(slots=True)
class RequestRecord:
    request_id: str
    path: str = ""
    """That was asked for."""
    begun: float = field(default_factory=time.monotonic)
    """When it came, in seconds."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Counts of tokens; times in seconds."""
    client: str = ""
    """Its connection, where what is asked of it may end others of its requests."""
    failure: Failure | None = None
    """What its client was told, or would have been."""
    error_format: ErrorFormat | None = None
    """Of the dialect that it speaks, once that is known."""
    unknown: UnknownFields = field(default_factory=UnknownFields)
    """Its fields that nobody here knows."""

    def note(self, output: RequestOutput) -> None:
        """One of its prompts has been answered: counts add up, of times the longest counts."""
        times, facts = output.times, self.facts
        counts = {
            "prompt": len(output.prompt_token_ids),
            "cached": output.num_cached_tokens,
            "output": sum(len(made.token_ids) for made in output.outputs),
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
