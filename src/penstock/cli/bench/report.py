"""Results of a load test, under vLLM's names, and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .sample import Outcome, Sample

BUSY = 0.9  # share of a core above which the client may be the bottleneck
LATE = 50.0  # delay of requests in milliseconds above which the client may be the bottleneck


OFFLINE_PERCENTILES = (10, 25, 50, 75, 90, 99)
TITLES = {"client_queue_time": "client queue time", "e2el_including_client_queue": "E2EL with queue"}
"""Titles of metrics in the table, if they differ from the name in capitals."""


def percentiles_of(values: Sequence[float]) -> dict[str, float]:
    """Percentiles that vLLM's offline benchmarks report, by number."""
    numbers = np.percentile(values, OFFLINE_PERCENTILES).tolist()
    return dict(zip(map(str, OFFLINE_PERCENTILES), numbers, strict=True))


def latencies(samples: Sequence[Sample], metric: str) -> np.ndarray:
    """Values of a metric in milliseconds: one per request, or for ``itl`` one per gap between two chunks.

    ``tpot`` excludes responses with a single token.
    """
    if metric == "itl":
        gaps = [np.diff(sample.chunks) for sample in samples]
        return np.concatenate(gaps) * 1e3 if gaps else np.empty(0)
    counted = [sample for sample in samples if metric != "tpot" or sample.output_tokens > 1]
    return np.array([getattr(sample, metric) for sample in counted]) * 1e3


def running(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Times in seconds at which the number of running requests changes, and the number from then on."""
    moments = np.array([s.sent for s in samples] + [s.last for s in samples])
    steps = np.repeat([1, -1], len(samples))
    order = np.lexsort((steps, moments))  # at equal times, ends of requests precede starts
    return moments[order], np.cumsum(steps[order])


def token_rate(samples: Sequence[Sample], width: float) -> np.ndarray:
    """Output tokens per second in each interval of ``width`` seconds since the start of the load.

    A request's tokens are divided evenly among its chunks.
    """
    streamed = [s for s in samples if s.chunks]
    if not streamed:
        return np.zeros(1)
    moments = np.concatenate([np.asarray(s.chunks) for s in streamed])
    shares = np.concatenate([np.full(len(s.chunks), s.output_tokens / len(s.chunks)) for s in streamed])
    rates: np.ndarray = np.bincount((moments / width).astype(int), shares) / width
    return rates


def compute_results(
    samples: Sequence[Sample], percentiles: Sequence[float], metrics: Sequence[str], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Results by name. Throughput refers to the time until the end of the last request.

    Args:
        samples: samples of all requests. At least one request must have succeeded.
        percentiles: percentiles of each metric, 0 to 100.
        metrics: latencies to report: ttft, tpot, itl, e2el.
        goodput: maximum milliseconds by metric for requests that count in ``request_goodput``.
    """
    good = [sample for sample in samples if sample.outcome is Outcome.OK]
    outcomes = Counter(sample.outcome for sample in samples)
    seconds = max(sample.last for sample in samples)
    input_tokens, output_tokens = sum(s.input_tokens for s in good), sum(s.output_tokens for s in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "refused": outcomes[Outcome.REFUSED],
        "error_counts": dict(Counter(s.reason for s in samples if s.reason).most_common()),
        "without_usage": sum(not s.counted for s in good),
        "total_input_tokens": input_tokens,
        "total_cached_tokens": sum(s.cached_tokens for s in good),
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / seconds,
        "output_throughput": output_tokens / seconds,
        "request_goodput": None,
        "total_token_throughput": (input_tokens + output_tokens) / seconds,
        "max_output_tokens_per_s": token_rate(good, 1.0).max(),
        "max_concurrent_requests": int(running(good)[1].max()),
        "p99_send_lag_ms": float(np.percentile([(s.sent - s.due) * 1e3 for s in samples], 99)),
    }
    if goodput:
        limits = goodput.items()
        within = (all(getattr(sample, metric) * 1e3 <= limit for metric, limit in limits) for sample in good)
        result["request_goodput"] = sum(within) / seconds
    for metric in metrics:
        result |= _summary(metric, latencies(good, metric), percentiles)
    return result


def _summary(metric: str, values: np.ndarray, percentiles: Sequence[float]) -> dict[str, float | None]:
    """Statistics of a latency metric in milliseconds, by name; None without values."""
    names = [f"{name}_{metric}_ms" for name in ("mean", "std", "median", *(f"p{p:g}" for p in percentiles))]
    if not len(values):
        return dict.fromkeys(names)
    statistics = [values.mean(), values.std(), *np.percentile(values, [50, *percentiles])]
    return {name: float(value) for name, value in zip(names, statistics, strict=True)}


def details(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Measurements of each request, under vLLM's names. Times are in seconds."""
    good = [sample.outcome is Outcome.OK for sample in samples]
    return {
        "input_lens": [s.input_tokens for s in samples],
        "output_lens": [s.output_tokens for s in samples],
        "ttfts": [s.ttft if ok and s.chunks else 0.0 for s, ok in zip(samples, good, strict=True)],
        "itls": [np.diff(s.chunks).tolist() for s in samples],
        "latencies": [s.e2el for s in samples],
        "start_times": [s.sent for s in samples],
        "queue_times": [s.client_queue_time for s in samples],
        "generated_texts": ["".join(s.text or ()) for s in samples],
        "errors": [s.reason for s in samples],
    }


def table(results: Mapping[str, Any], percentiles: Sequence[float], metrics: Sequence[str]) -> str:
    """Format the results as a table."""
    lines = [f"{name:<20} {value}" for name, value in _overview(results)]
    heads = ["mean", "median", *(f"p{p:g}" for p in percentiles)]
    lines += ["", f"{'milliseconds':<20}" + "".join(f"{head:>11}" for head in heads)]
    for metric in metrics:
        title, cells = TITLES.get(metric, metric.upper()), [results[f"{head}_{metric}_ms"] for head in heads]
        lines.append(f"{title:<20}" + "".join(f"{'–' if c is None else f'{c:,.2f}':>11}" for c in cells))
    return "\n".join([*lines, *_notes(results)])


def _overview(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    refused = f" ({results['refused']:,} of them refused)" if results["refused"] else ""
    failed = f", {results['failed']:,} failed{refused}" if results["failed"] else ""
    goodput = results["request_goodput"]
    limited = [("goodput", f"{goodput:,.2f} requests/s within the limits")] if goodput is not None else []
    cached = f", {results['total_cached_tokens']:,} of them cached" if results["total_cached_tokens"] else ""
    best, maximum = results["max_output_tokens_per_s"], results["max_concurrent_requests"]
    return [
        ("model", results["model_id"]),
        ("requests", f"{results['completed']:,} ok{failed}"),
        ("peak concurrency", f"{maximum:,} requests"),
        ("duration", f"{results['duration']:,.2f} s"),
        ("input", f"{results['total_input_tokens']:,} tokens{cached}"),
        ("output", f"{results['total_output_tokens']:,} tokens"),
        ("request throughput", f"{results['request_throughput']:,.2f} requests/s"),
        *limited,
        ("output throughput", f"{results['output_throughput']:,.1f} tokens/s, {best:,.1f} in the best second"),
        ("total throughput", f"{results['total_token_throughput']:,.1f} tokens/s"),
        ("client", f"{results['client_cpu']:.0%} of a core, sent {results['p99_send_lag_ms']:,.1f} ms late (p99)"),
    ]


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Warnings about the results."""
    notes = [f"{count:,} × {reason}" for reason, count in list(results["error_counts"].items())[:3]]
    if results["without_usage"]:
        notes.append(f"{results['without_usage']:,} responses had no usage: each of their chunks counts as one token")
    if results["client_cpu"] > BUSY or results["p99_send_lag_ms"] > LATE:
        notes.append("the client was a bottleneck: it sent requests late, or added to these latencies")
    return ["", *notes] if notes else []
