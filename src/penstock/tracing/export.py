"""Sends spans to a collector over OTLP, by gRPC or HTTP, and counts what becomes of them."""

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
"""Spans that wait for the collector; more are dropped."""
MAX_BATCH = 512
"""Spans of one call to the collector."""
INTERVAL_MS = 1000
"""Milliseconds after which spans are sent that do not fill a batch, unless ``OTEL_BSP_SCHEDULE_DELAY`` says so."""
EXPORT_TIMEOUT = 5
"""Seconds that the collector has to take a batch, repetitions included, unless ``OTEL_EXPORTER_OTLP_TIMEOUT`` says."""
HTTP_PORT, HTTP_PATH = 4318, "/v1/traces"
"""OTLP's over HTTP."""


@dataclass(slots=True)
class SpanCounts:
    """Counters of spans."""

    exported: int = 0
    """Taken by the collector."""
    dropped: int = 0
    """Not taken: the queue was full, or the collector did not answer."""
    listener: Callable[[str, int], None] | None = None
    """Called with the name of a counter and what was added to it."""

    def add(self, name: str, count: int) -> None:
        setattr(self, name, getattr(self, name) + count)
        if self.listener:
            self.listener(name, count)


def new_exporter(endpoint: str) -> SpanExporter:
    """The exporter for an endpoint: HTTP where its path is ``/v1/traces`` or its port 4318, else gRPC, unless
    ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` says which."""
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
    """Counts what another exporter sends, and logs when the collector stops and begins to answer."""

    def __init__(self, exporter: SpanExporter, endpoint: str, counts: SpanCounts) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._counts = counts
        self._failing = False
        self.num_taken = 0
        """Spans that were taken from the queue."""

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
            logger.warning("the collector at %s does not take spans; they are dropped until it does", self._endpoint)
        elif self._failing and not failed:
            logger.info("the collector at %s takes spans again", self._endpoint)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class BoundedProcessor(BatchSpanProcessor):
    """Queues ended spans for an exporter; drops and counts those that it has no room for."""

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
    """The processor of a process's spans."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line and a traceback for each try
    return BoundedProcessor(CountingExporter(new_exporter(endpoint), endpoint, counts), counts)
