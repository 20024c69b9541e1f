"""Plot of a load test: distribution of latencies, and load over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from .report import latencies, running, token_rate
from .sample import Outcome, Sample

PANELS = {
    "ttft": ("Time to first token (TTFT)", "requests"),
    "itl": ("Inter-token latency (ITL)", "gaps between chunks"),
    "e2el": ("End-to-end latency (E2EL)", "requests"),
}
LINE, QUIET, LIMIT = "#1f5fa8", "#8a8a8a", "#c0392b"
INTERVALS = 80  # maximum number of intervals on the time axis
SHORTEST = 0.1  # minimum length of an interval in seconds


def draw(samples: Sequence[Sample], goodput: Mapping[str, float], title: str, path: Path) -> None:
    """Write the plot; the suffix of ``path`` selects the format.

    Args:
        samples: samples of all requests. At least one request must have succeeded.
        goodput: latency limits in milliseconds by metric, drawn in the metric's panel.
    """
    good = [sample for sample in samples if sample.outcome is Outcome.OK]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    grid = figure.add_gridspec(3, 3, height_ratios=[2, 1, 1])
    for column, metric in enumerate(PANELS):
        _distribution(figure.add_subplot(grid[0, column]), metric, latencies(good, metric), goodput.get(metric))
    above = figure.add_subplot(grid[1, :])
    _plot_over_time(above, figure.add_subplot(grid[2, :], sharex=above), good)
    figure.savefig(path, dpi=120)


def _distribution(axes: Any, metric: str, values: np.ndarray, limit: float | None) -> None:
    """Plot the cumulative distribution of a metric."""
    title, unit = PANELS[metric]
    axes.set_xlabel("milliseconds")
    axes.set_ylabel(f"share of {unit}")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _style_axes(axes)
    if not values.any():
        axes.set_title(f"{title}\nnone", loc="left", fontsize="medium")
        return
    middle, tail = np.percentile(values, [50, 99])
    axes.set_title(f"{title}\np50 {_short(middle)}, p99 {_short(tail)} ms", loc="left", fontsize="medium")
    if limit is not None:
        axes.axvline(limit, color=LIMIT, linestyle="--", linewidth=1)
        kept = f"{np.mean(values <= limit):.0%} within {limit:,g} ms"
        axes.set_title(kept, loc="right", fontsize="small", color=LIMIT)
    shares = np.arange(1, len(values) + 1) / len(values)
    values = np.sort(values)
    shown = values > 0  # a logarithmic axis cannot show gaps of 0 (simultaneous chunks), which count in the shares
    values, shares = values[shown], shares[shown]
    axes.plot(values, shares, color=LINE, drawstyle="steps-post")
    axes.plot(np.maximum([middle, tail], values[0]), [0.5, 0.99], "o", color=LINE, markersize=4)
    if values[-1] > 10 * values[0]:  # within one power of ten, a logarithmic axis would have hardly any labels
        axes.set_xlabel("milliseconds (log scale)")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if values[-1] < 500 * values[0] else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _plot_over_time(above: Any, below: Any, good: Sequence[Sample]) -> None:
    """Plot the number of running requests, and the output tokens per second, over time."""
    moments, counts = running(good)
    above.step(moments, counts, where="post", color=LINE, linewidth=1)
    above.fill_between(moments, counts, step="post", color=LINE, alpha=0.15)
    above.set_title("Running requests", loc="left", fontsize="medium")
    above.tick_params(labelbottom=False)
    width = max(moments[-1] / INTERVALS, SHORTEST)
    rates = token_rate(good, width)
    below.stairs(rates, np.arange(len(rates) + 1) * width, color=LINE, fill=True, alpha=0.6)
    below.set_title("Output tokens per second", loc="left", fontsize="medium")
    below.set_xlabel("seconds since the start of the load")
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for axes in (above, below):
        _style_axes(axes)
        axes.set_ylim(bottom=0)
    below.set_xlim(0, max(moments[-1], len(rates) * width))


def _style_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=QUIET, alpha=0.25, linewidth=0.6)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
