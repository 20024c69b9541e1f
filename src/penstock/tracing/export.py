"""Export of spans to a collector over OTLP (gRPC or HTTP), with counters of exported and dropped spans."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

logger = logging.getLogger("penstock.tracing")

MAX_QUEUED = 4096
"""Maximum number of spans that wait for the collector; further spans are dropped."""
MAX_BATCH = 512
"""Maximum number of spans in an export call."""
INTERVAL_MS = 1000
"""Milliseconds after which an incomplete batch is sent; ``OTEL_BSP_SCHEDULE_DELAY`` overrides it."""
EXPORT_TIMEOUT = 5
"""Timeout of an export in seconds, including retries; ``OTEL_EXPORTER_OTLP_TIMEOUT`` overrides it."""
HTTP_PORT, HTTP_PATH = 4318, "/v1/traces"
"""Default port and path of OTLP over HTTP."""


@dataclass(slots=True)
class SpanCounts:
    """Counters of exported and dropped spans of a process."""

    exported: int = 0
    """Number of spans accepted by the collector."""
    dropped: int = 0
    """Number of spans not exported: the queue was full, or the collector did not accept them."""
    listener: Callable[[str, int], None] | None = None
    """Called with the name of a counter and its increment."""

    def add(self, name: str, count: int) -> None:
        setattr(self, name, getattr(self, name) + count)
        if self.listener:
            self.listener(name, count)


def new_exporter(endpoint: str) -> SpanExporter:
    """Create the exporter for an endpoint: over HTTP if its path is ``/v1/traces`` or its port is 4318, otherwise over
    gRPC. ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` overrides it."""
    url = urlsplit(endpoint)
    timeout = None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else EXPORT_TIMEOUT
    over_http = url.port == HTTP_PORT or url.path.endswith(HTTP_PATH)
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or ("http/protobuf" if over_http else "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        over_grpc: SpanExporter = GrpcExporter(endpoint, insecure=url.scheme == "http", timeout=timeout)
        return over_grpc
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    from .collector_session import CollectorSession

    if url.path in ("", "/"):
        endpoint = endpoint.rstrip("/") + HTTP_PATH
    exporter: SpanExporter = HttpExporter(endpoint, timeout=timeout, session=CollectorSession())
    return exporter


class CountingExporter(SpanExporter):
    """Counts the spans that another exporter sends, and logs when the collector fails and recovers."""

    def __init__(self, exporter: SpanExporter, endpoint: str, counts: SpanCounts) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._counts = counts
        self._failing = False
        self.num_taken = 0
        """Number of spans taken from the queue."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            logger.debug("spans could not be sent", exc_info=error)
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        self._counts.add("dropped" if failed else "exported", len(spans))
        if failed and not self._failing:
            logger.warning("the collector at %s does not accept spans: dropping them until it does", self._endpoint)
        elif self._failing and not failed:
            logger.info("the collector at %s accepts spans again", self._endpoint)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class BoundedProcessor(BatchSpanProcessor):
    """Queues ended spans for an exporter; drops and counts spans if the queue is full."""

    def __init__(self, exporter: CountingExporter, counts: SpanCounts) -> None:
        interval = None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else INTERVAL_MS
        super().__init__(exporter, MAX_QUEUED + MAX_BATCH, interval, MAX_BATCH)
        self._exporter = exporter
        self._counts = counts
        self._num_queued = 0

    def on_end(self, span: ReadableSpan) -> None:
        if not (span.context and span.context.trace_flags.sampled):
            return
        if self._num_queued - self._exporter.num_taken >= MAX_QUEUED:
            self._counts.add("dropped", 1)
            return
        self._num_queued += 1
        super().on_end(span)


def new_processor(endpoint: str, counts: SpanCounts) -> BoundedProcessor:
    """Create the span processor of a process."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would log a traceback per failed attempt
    return BoundedProcessor(CountingExporter(new_exporter(endpoint), endpoint, counts), counts)
