"""Rendering of ``penstock top`` as lines of text."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from ..table import columns_of, cut, table

SPAN = 120.0
"""Length in seconds of the window for latency quantiles."""


class Glyphs(NamedTuple):
    """Characters for bars (filled and empty part) and for sparklines (ascending heights)."""

    bar: str
    empty: str
    heights: str


BLOCKS = Glyphs("█", "░", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", ".", "_.-=+*%#")
"""Glyphs for terminals with an encoding that lacks block characters."""
COLUMNS = (
    ("REQUEST", "id"),
    ("STATE", "state"),
    ("PROMPT", "prompt_tokens"),
    ("CACHED", "cached_tokens"),
    ("COMPUTED", "computed_tokens"),
    ("OUTPUT", "output_tokens"),
    ("SECONDS", "seconds"),
    ("BLOCKS", "blocks"),
)
"""Columns of the table of sequences: title, and field of a sequence in a snapshot."""
LEFT = frozenset(("REQUEST", "STATE"))
"""Columns that are aligned left."""
EXPENDABLE = ("CACHED", "BLOCKS", "COMPUTED", "SECONDS", "PROMPT", "STATE")
"""Columns that are dropped in narrow terminals, in this order."""
SEPARATOR = "   "
HISTOGRAMS = {"first token": "time_to_first_token_seconds", "between tokens": "inter_token_latency_seconds"}

Answer = dict[str, Any]
"""Response of ``/web/live``."""


class History:
    """Responses of the last ``SPAN`` seconds."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque()

    def add(self, answer: Answer) -> None:
        if self._answers and _total_requests(answer) < _total_requests(self.last):
            self._answers.clear()  # the server was restarted
        self._answers.append(answer)
        while answer["time"] - self._answers[0]["time"] > SPAN:
            self._answers.popleft()

    @property
    def last(self) -> Answer:
        return self._answers[-1]

    def rate(self, model: str, counter: str) -> float:
        """Increase of a counter per second, between the last two responses."""
        if len(self._answers) < 2:
            return 0.0
        before, after = self._answers[-2], self._answers[-1]
        old, new = (_model(answer, model)["counters"].get(counter, 0) for answer in (before, after))
        return float(max(0.0, (new - old) / max(after["time"] - before["time"], 1e-9)))

    def quantiles(self, model: str, histogram: str) -> tuple[float, float] | None:
        """Median and 95th percentile of a histogram, as upper bounds of buckets; None without observations."""
        first, last = (_model(answer, model)["histograms"].get(histogram) for answer in (self._answers[0], self.last))
        before = first["counts"] if first else [0] * len(last["counts"])
        counts = [now - then for now, then in zip(last["counts"], before, strict=False)]
        if not (total := sum(counts)):
            return None
        return _quantile(last["buckets"], counts, 0.5 * total), _quantile(last["buckets"], counts, 0.95 * total)


def render(history: History, url: str, width: int, height: int | None, glyphs: Glyphs = BLOCKS) -> list[str]:
    """Render the view as lines.

    Args:
        width: maximum columns of a line.
        height: maximum number of lines; None: no limit.
    """
    now = time.strftime("%H:%M:%S", time.localtime(history.last["time"]))
    lines = _wrapped(["penstock top", url, now], width)
    for model in history.last["models"]:
        for number, engine in enumerate(model["engines"]):
            where = engine["address"] or (f"engine {number}" if len(model["engines"]) > 1 else "")
            name = " ".join([model["name"], where, engine["role"]]).strip()
            lines += ["", *_engine(history, model, engine, name, width, glyphs)]
    if not history.last["models"]:
        lines += ["", "no model is loaded yet"]
    if height is not None and len(lines) > height - 1:
        lines = [*lines[: height - 2], f"and {len(lines) - height + 2} more lines"]
    return [cut(line, width) for line in lines]


def _engine(history: History, model: Answer, engine: Answer, name: str, width: int, glyphs: Glyphs) -> list[str]:
    stats, counters, snapshot = engine["stats"], model["counters"], engine["snapshot"]
    used = stats["blocks_used"] / max(stats["blocks"], 1)
    length = max(5, min(20, width - 36))
    bar = glyphs.bar * round(length * used)
    rates = [history.rate(model["name"], counter) for counter in ("generation_tokens", "prompt_tokens")]
    times = [
        f"{label} p50 {_time(found[0])}, p95 {_time(found[1])}"
        for label, histogram in HISTOGRAMS.items()
        if (found := history.quantiles(model["name"], histogram))
    ]
    rows = [
        [name, f"steps {stats['steps']:,}", f"heartbeat {_time(stats['heartbeat_age'])}"],
        [
            f"running {stats['running']}",
            f"waiting {stats['waiting']}",
            f"generated {rates[0]:,.0f} tokens/s",
            f"prompts {rates[1]:,.0f} tokens/s",
            f"preemptions {stats['preemptions']}",
            *([f"resumed requests {resumed:,.0f}"] if (resumed := counters.get("requests_resumed")) else []),
        ],
        [
            f"KV cache {bar:{glyphs.empty}<{length}} {100 * used:.0f} % of {stats['blocks']:,} blocks",
            *(
                [f"state snapshots {stats['state_snapshots_used']:,} of {count:,}"]
                if (count := stats["state_snapshots"])
                else []
            ),
            f"prefix hits {_share(counters['prefix_cache_hits'], counters['prefix_cache_queries'])}",
            *_drafts(stats),
        ],
        times,
    ]
    lines = [line for row in rows for line in _wrapped(row, width)]
    if snapshot is None:
        return [*lines, "no snapshot of the engine is available"]
    if snapshot["steps"]:
        title = "tokens of the last steps "
        lines.append(title + _sparkline(snapshot["steps"], max(10, width - len(title) - 1), glyphs.heights))
    return [*lines, *_table(snapshot, width)]


def _drafts(stats: dict[str, Any]) -> list[str]:
    """Accepted share of draft tokens, tokens per step, and gain of speculative decoding, since the engine started."""
    share = f"drafts accepted {_share(stats['accepted_tokens'], stats['draft_tokens'])}"
    if not stats["accepted_tokens"] or not stats["decode_seconds"]:
        return [share]
    per_step = 1 + stats["accepted_tokens"] / max(stats["decoded_rows"], 1)
    gain = stats["seconds_without_drafts"] / stats["decode_seconds"]
    return [share, f"tokens per step {per_step:.2f}", f"speed {gain:.2f} x that without drafts"]


def _wrapped(parts: list[str], width: int) -> list[str]:
    """Join parts into as few lines as the width allows."""
    lines: list[str] = []
    for part in parts:
        if lines and columns_of(lines[-1] + SEPARATOR + part) <= width:
            lines[-1] += SEPARATOR + part
        else:
            lines.append(part)
    return lines


def _table(snapshot: Answer, width: int) -> list[str]:
    sequences = snapshot["sequences"]
    if not sequences:
        return []
    columns = {title: [title, *(_cell(field, one[field]) for one in sequences)] for title, field in COLUMNS}
    for title in EXPENDABLE:
        if sum(max(map(len, cells)) + 2 for cells in columns.values()) - 2 > width:
            del columns[title]
    lines = table(list(columns), list(zip(*columns.values(), strict=True))[1:], right=columns.keys() - LEFT)
    return [*lines, *([f"and {snapshot['hidden']:,} more"] if snapshot["hidden"] else [])]


def _cell(field: str, value: Any) -> str:
    if field == "blocks":
        return str(len(value))
    return f"{value:.1f}" if field == "seconds" else str(value)


def _sparkline(steps: list[Answer], width: int, heights: str) -> str:
    """One character per step; its height shows the number of tokens."""
    tokens = [sum(part[1] for part in step["parts"]) for step in steps[-width:]]
    most = max(1, *tokens)
    return "".join(heights[min(len(heights) - 1, len(heights) * count // (most + 1))] for count in tokens)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _total_requests(answer: Answer) -> float:
    return float(sum(model["counters"]["requests"] for model in answer["models"]))


def _model(answer: Answer, name: str) -> Answer:
    """Find a model in a response; without metrics if the model is not loaded."""
    empty: Answer = {"counters": {}, "histograms": {}}
    return next((model for model in answer["models"] if model["name"] == name), empty)


def _quantile(bounds: list[float | None], counts: list[float], wanted: float) -> float:
    seen, last = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        seen, last = seen + count, bound if bound is not None else last
        if seen >= wanted:
            break
    return last
