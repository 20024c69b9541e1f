"""Statistics per model, under the names of Triton's metrics.

The statistics are Prometheus gauges in the multiprocess files of ``serve/metrics.py``, so that any API process can sum
the values of all processes. ``/v2/models/NAME/stats`` reads these gauges, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import Gauge, Metric

from penstock.core import Code, PenstockError
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.metrics import process_metrics
from penstock.serve.shared_result import SharedResult

from .model import VERSION, Model, ModelCall

MICROSECONDS, MILLISECONDS = 1e6, 1e3
NANOSECONDS_PER_MICROSECOND = 1000
REASONS = {Code.OVERLOADED: "REJECTED", Code.CANCELLED: "CANCELED"}
HELP = {
    "nv_inference_request_success": "Number of successful requests.",
    "nv_inference_count": "Number of rows in successful requests.",
    "nv_inference_exec_count": "Number of executed requests.",
    "nv_inference_request_duration_us": "Total time of successful requests, microseconds.",
    "nv_inference_queue_duration_us": "Total queue time of successful requests, microseconds.",
    "nv_inference_compute_infer_duration_us": "Total time after the queue of successful requests, microseconds.",
}
FAILURES = "nv_inference_request_failure"
LAST_INFERENCE = "penstock:kserve_last_inference_milliseconds"


class Statistics:
    """The statistics that one API process collects."""

    def __init__(self) -> None:
        labels = ["model", "version"]
        # gauges, because prometheus_client appends _total to the names of counters
        self._sums = {name: Gauge(name, about, labels, multiprocess_mode="sum") for name, about in HELP.items()}
        about = "Time of the last successful request, milliseconds since 1970."
        self._last = Gauge(LAST_INFERENCE, about, labels, multiprocess_mode="max")
        self._families = SharedResult(lambda: asyncio.to_thread(process_metrics))
        self._failures = Gauge(FAILURES, "Number of failed requests.", [*labels, "reason"], multiprocess_mode="sum")

    @contextmanager
    def count_request(self, model: Model, record: RequestRecord, call: ModelCall) -> Iterator[None]:
        """Count the request that runs in the ``with`` block: as successful, or as failed if an exception is raised."""
        started = time.monotonic()
        try:
            yield
        except BaseException as error:
            code = error.failure.code if isinstance(error, PenstockError) else None
            if not isinstance(error, Exception):  # CancelledError or GeneratorExit: the client has disconnected
                code = Code.CANCELLED
            reason = REASONS.get(code, "OTHER") if code else "OTHER"
            self._failures.labels(model=model.name, version=VERSION, reason=reason).inc()
            raise
        spent, queued = (time.monotonic() - started) * MICROSECONDS, record.log_fields.get("queue", 0.0) * MICROSECONDS
        self._last.labels(model=model.name, version=VERSION).set(int(time.time() * MILLISECONDS))
        values = (1, call.rows, 1, spent, queued, max(0.0, spent - queued))
        for name, value in zip(HELP, values, strict=True):
            self._sums[name].labels(model=model.name, version=VERSION).inc(value)

    async def statistics(self, models: Iterable[Model]) -> list[dict[str, Any]]:
        """The statistics of models over all API processes, as ``/v2/models/NAME/stats`` returns them."""
        families = await self._families.get()
        return [self._statistics(model, families) for model in models]

    def _statistics(self, model: Model, families: Iterable[Metric]) -> dict[str, Any]:
        result = dict.fromkeys([*HELP, FAILURES, LAST_INFERENCE], 0.0)
        for family in families:
            for sample in family.samples if family.name in result else ():
                if sample.labels.get("model") == model.name:
                    result[family.name] += sample.value
        answered, rows, computed, _, queued, inferred = (int(result[name]) for name in HELP)

        def duration(count: int, microseconds: int) -> dict[str, int]:
            return {"count": count, "ns": microseconds * NANOSECONDS_PER_MICROSECOND}

        return {
            "name": model.name,
            "version": VERSION,
            "last_inference": int(result[LAST_INFERENCE]),
            "inference_count": rows,
            "execution_count": computed,
            "inference_stats": {
                "success": duration(answered, queued + inferred),
                "fail": duration(int(result[FAILURES]), 0),
                "queue": duration(answered, queued),
                "compute_input": duration(answered, 0),
                "compute_infer": duration(answered, inferred),
                "compute_output": duration(answered, 0),
                "cache_hit": duration(0, 0),
                "cache_miss": duration(0, 0),
            },
            "batch_stats": [],
            "memory_usage": [],
            "response_stats": {},
        }
