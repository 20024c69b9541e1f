"""Spans of requests, implemented with OpenTelemetry's SDK."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.config.options import LogOptions
from penstock.version import __version__

from .export import SpanCounts, new_processor

STOP_TIMEOUT = 2.0
"""Maximum seconds that an exiting process waits for the export of queued spans."""
MAX_ATTRIBUTE_LENGTH = 1024
"""Maximum characters of an attribute: paths and error messages contain text from clients."""
PROPAGATOR = TraceContextTextMapPropagator()
CARRIED = ("traceparent", "tracestate")
Attributes = Mapping[str, Any]


class Span:
    """An operation of a trace. Times are in seconds on the monotonic clock. A span that is not sampled does nothing."""

    __slots__ = ("_span", "_tracer", "ended")

    def __init__(self, tracer: Tracer, span: otel.Span) -> None:
        self._tracer = tracer
        self._span = span
        self.ended = False

    @property
    def sampled(self) -> bool:
        return self._span.is_recording()

    @property
    def context(self) -> dict[str, str]:
        """W3C trace context (``traceparent``, ``tracestate``) for child spans in other processes."""
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, otel.set_span_in_context(self._span))
        return carrier

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log lines that belong to the span."""
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def child(self, name: str, begun: float, attributes: Attributes | None = None) -> Span:
        """Start a child span, which the caller must end."""
        context = otel.set_span_in_context(self._span)
        return Span(self._tracer, self._tracer.start_span(name, context, SpanKind.INTERNAL, begun, attributes))

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Set attributes, except those that are None."""
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def event(self, name: str, at: float) -> None:
        self._span.add_event(name, timestamp=_wall_clock(at))

    def fail(self, kind: str, message: str) -> None:
        """Mark the operation as failed.

        Args:
            kind: error code.
        """
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, message))

    def end(self, at: float | None = None) -> None:
        """End the span, now or at ``at``. Does nothing if it has ended."""
        if not self.ended:
            self.ended = True
            self._span.end(_wall_clock(time.monotonic() if at is None else at))


class Tracer:
    """Creates the spans of a process, and sends them to the collector.

    A trace is sampled if the ``traceparent`` of the request says so; without ``traceparent``, with the probability
    ``trace_sampling_ratio``. A thread exports spans from a bounded queue: if the collector does not respond, spans are
    dropped, and requests are not delayed.

    Args:
        process: name of the process, as in the log.
    """

    def __init__(self, options: LogOptions, process: str) -> None:
        self.counts = SpanCounts()
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME") or "penstock",
                "service.version": __version__,
                "service.instance.id": f"{os.uname().nodename}:{os.getpid()}",
                "process.pid": os.getpid(),
                "penstock.process": process,
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(options.trace_sampling_ratio)),
            resource=resource,
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_LENGTH),
        )
        self._provider.add_span_processor(new_processor(options.otlp_endpoint, self.counts))
        self._tracer = self._provider.get_tracer("penstock", __version__)

    def server_span(self, name: str, headers: Mapping[str, str], begun: float, attributes: Attributes) -> Span:
        """Start the span of an incoming request.

        Args:
            headers: HTTP headers or gRPC metadata, with ``traceparent`` and ``tracestate`` if the client is traced.
        """
        return self._from_context(name, headers, SpanKind.SERVER, begun, attributes)

    def span(self, name: str, context: Mapping[str, str], begun: float, attributes: Attributes | None = None) -> Span:
        """Start a span with a parent in another process; ``context`` is ``Span.context`` of the parent."""
        return self._from_context(name, context, SpanKind.INTERNAL, begun, attributes)

    def start_span(
        self, name: str, context: Any, kind: SpanKind, begun: float, attributes: Attributes | None
    ) -> otel.Span:
        return self._tracer.start_span(name, context, kind, attributes, start_time=_wall_clock(begun))

    def close(self) -> None:
        """Export queued spans, for at most ``STOP_TIMEOUT``."""
        stopping = threading.Thread(target=self._provider.shutdown, daemon=True)
        stopping.start()
        stopping.join(STOP_TIMEOUT)

    def _from_context(
        self, name: str, carrier: Mapping[str, str], kind: SpanKind, begun: float, attributes: Attributes | None
    ) -> Span:
        context = PROPAGATOR.extract({key: carrier[key] for key in CARRIED if key in carrier}, Context())
        return Span(self, self.start_span(name, context, kind, begun, attributes))


def _wall_clock(at: float) -> int:
    """Convert a time on the monotonic clock to nanoseconds since 1970."""
    return time.time_ns() + int((at - time.monotonic()) * 1e9)
