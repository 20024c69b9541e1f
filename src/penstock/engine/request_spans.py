"""Trace spans of requests in an engine (queue, prefill, decode), recorded when a request ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.core import Failure

from .scheduling.sequence_group import SequenceGroup

if TYPE_CHECKING:
    from penstock.tracing import Span, Tracer


class RequestSpans:
    """Records the spans of traced requests. The spans' times are those of a request's first sequence; output tokens and
    preemptions are counted over all its sequences."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def record(self, group: SequenceGroup, failure: Failure | None) -> None:
        """Record a request that has ended; ``failure`` is None if the request has finished without an error."""
        request, first, now = group.request, group.first, time.monotonic()
        if not request.is_sampled:
            return
        started, first_token = first.first_scheduled or None, first.first_token or None
        queue = self._tracer.span("queue", request.trace, first.arrived, {"penstock.priority": request.priority})
        _end(queue, started, now, failure)
        if started:
            prefill = self._tracer.span("prefill", request.trace, started)
            prefill.set(
                {
                    "gen_ai.usage.input_tokens": first.prompt_length,
                    "gen_ai.usage.cache_read.input_tokens": first.num_cached_tokens,
                    "penstock.kv_transfer.imported": None if first.num_imported is None else True,
                }
            )
            for at in group.preempted_at:
                if not first_token or at < first_token:
                    prefill.event("preempted", at)
            _end(prefill, first_token, now, failure)
        if first_token:
            decode = self._tracer.span("decode", request.trace, first_token)
            decode.set(
                {
                    "gen_ai.usage.output_tokens": sum(one.num_output_tokens for one in group.sequences),
                    "penstock.num_sequences": len(group.sequences),
                    "penstock.draft_tokens": sum(one.draft_tokens for one in group.sequences) or None,
                    "penstock.accepted_tokens": sum(one.accepted_tokens for one in group.sequences) or None,
                }
            )
            for at in group.preempted_at:
                if at >= first_token:
                    decode.event("preempted", at)
            _end(decode, None, now, failure)


def _end(span: Span, end: float | None, now: float, failure: Failure | None) -> None:
    """End a span at ``end``. If ``end`` is None, the span ends at ``now``, with ``failure`` unless that is None."""
    if end is None and failure:
        span.fail(failure.code.value, failure.message)
    span.end(now if end is None else end)
