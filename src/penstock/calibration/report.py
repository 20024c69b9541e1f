"""The report of a quantization: JSON, and an HTML page with inline SVG charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .options import METHODS
from .state import REPORT, RunState

PAGE = "quantization_report.html"
WIDTH, HEIGHT, MARGIN = 760, 220, 56
"""Width, height and margin of a chart in pixels."""
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 800px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } td, th { padding: 2px 14px 2px 0; text-align: left; font-weight: normal; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } th { color: #666; }
svg text { font: 11px system-ui, sans-serif; fill: #666; } .key { margin-right: 1em; white-space: nowrap; }
"""


def make_report(
    job: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int],
    written: Mapping[str, int],
) -> dict[str, Any]:
    """Return the report as plain data. It contains no times, so that equal runs have equal reports.

    Args:
        job: options and inputs of the run.
        layers: results of each layer (``RunState.layer``); the results of the last layer contain "quality".
        sizes: numbers of samples, and number of tokens per sample.
        written: size of the tensors in bytes, before and after quantization.
    """
    return {
        "job": dict(job),
        **sizes,
        **written,
        **layers[-1]["quality"],
        "layers": [{"error": layer["error"], "matrices": layer["matrices"]} for layer in layers],
    }


def write_report(report: Mapping[str, Any], output: Path, state: RunState) -> None:
    """Write the JSON and the HTML file."""
    text = json.dumps(report, indent=1) + "\n"
    state.write(output / PAGE, lambda path: path.write_text(render(report), encoding="utf-8"))
    state.write(output / REPORT, lambda path: path.write_text(text, encoding="utf-8"))


def summary(report: Mapping[str, Any]) -> str:
    """Return the key figures as lines for a terminal."""
    return "\n".join(f"{name:<22} {value}" for name, value in _figures(report))


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    before, after = report["bytes_original"], report["bytes_quantized"]
    return [
        ("size", f"{_size(before)} before, {_size(after)} after ({after / before:.1%})"),
        ("perplexity", f"{report['perplexity_original']:.4f} before, {report['perplexity_quantized']:.4f} after"),
        ("KL divergence", f"{report['kl_divergence']:.5f} nats per token"),
        ("same top token", f"{report['top1_agreement']:.2%} of {report['tokens']:,} tokens"),
        ("hidden state error", f"{report['layers'][-1]['error']:.2e} (relative squared error after the last layer)"),
    ]


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def render(report: Mapping[str, Any]) -> str:
    """Return the HTML page."""
    job, layers = report["job"], report["layers"]
    method = METHODS[job["method"]]
    file_format = "compressed-tensors" if job.get("rotation") else method.file_format
    options = {name: value for name, value in job.items() if value not in ("", 0, [], "auto")}
    kinds = sorted({_kind(name) for layer in layers for name in layer["matrices"]})
    lines = {kind: [_max_error(layer["matrices"], kind) for layer in layers] for kind in kinds}
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>Quantization: {escape(job['method'])}</title><style>{STYLE}</style>",
        f"<h1>{escape(job['method'])}</h1><p>{escape(method.about)}, written as {file_format}. "
        f"Calibrated on {report['calibration_samples']} samples of {report['sample_tokens']} tokens, measured on "
        f"{report['measured_samples']} other samples.</p>",
        _table(("", ""), _figures(report), numbers=False),
        "<h2>Error after each layer</h2><p>Relative squared error of the hidden states, accumulated over the layers. "
        "The last bar is after the final norm.</p>",
        _bars([layer["error"] for layer in layers]),
        "<h2>Error of each matrix</h2><p>Relative squared error of the products of a matrix due to the rounding of its "
        "weights.</p>",
        _lines(lines),
        _table(
            ("layer", "error after layer", *kinds),
            [
                (
                    str(number),
                    f"{layer['error']:.2e}",
                    *("–" if (error := lines[kind][number]) is None else f"{error:.2e}" for kind in kinds),
                )
                for number, layer in enumerate(layers)
            ],
        ),
        "<h2>Options</h2>",
        _table(("", ""), [(name, str(value)) for name, value in options.items()], numbers=False),
    ]
    return "\n".join(parts) + "\n</html>\n"


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _max_error(matrices: Mapping[str, float], kind: str) -> float | None:
    return max((error for name, error in matrices.items() if _kind(name) == kind), default=None)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    kind = " class='n'" if numbers else ""
    top = "".join(f"<th{kind}>{escape(cell)}</th>" for cell in head) if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _axis(highest: float) -> tuple[float, str]:
    """Return the value at the top of a chart, and its grid lines with labels."""
    highest = highest or 1.0
    lines = []
    for part in range(5):
        y = MARGIN / 2 + (HEIGHT - MARGIN) * (1 - part / 4)
        lines.append(f"<line x1='{MARGIN}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        lines.append(f"<text x='{MARGIN - 6}' y='{y + 4:.1f}' text-anchor='end'>{highest * part / 4:.1e}</text>")
    return highest, "".join(lines)


def _x(index: int, count: int) -> float:
    return MARGIN + (WIDTH - MARGIN) * (index + 0.5) / count


def _y(value: float, highest: float) -> float:
    return MARGIN / 2 + (HEIGHT - MARGIN) * (1 - value / highest)


def _labels(count: int) -> str:
    return "".join(
        f"<text x='{_x(index, count):.1f}' y='{HEIGHT - 6}' text-anchor='middle'>{index}</text>"
        for index in range(0, count, max(1, count // 16))
    )


def _svg(content: str) -> str:
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='100%' role='img'>{content}</svg>"


def _bars(values: Sequence[float]) -> str:
    highest, axis = _axis(max(values))
    width = max(1.0, (WIDTH - MARGIN) / len(values) * 0.7)
    bars = "".join(
        f"<rect x='{_x(index, len(values)) - width / 2:.1f}' y='{_y(value, highest):.1f}' width='{width:.1f}' "
        f"height='{_y(0, highest) - _y(value, highest):.1f}' fill='{COLOURS[0]}'>"
        f"<title>layer {index}: {value:.3e}</title></rect>"
        for index, value in enumerate(values)
    )
    return _svg(axis + bars + _labels(len(values)))


def _lines(values: Mapping[str, Sequence[float | None]]) -> str:
    if not values:
        return "<p>No matrix is quantized.</p>"
    count = max(map(len, values.values()))
    highest, axis = _axis(max(value for line in values.values() for value in line if value is not None))
    drawn, keys = "", ""
    for number, (kind, line) in enumerate(values.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [(_x(index, count), _y(value, highest)) for index, value in enumerate(line) if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn += f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>"
        drawn += "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='{colour}'/>" for x, y in points)
        keys += f"<span class='key' style='color:{colour}'>■ {escape(kind)}</span>"
    return _svg(axis + drawn + _labels(count)) + f"<p>{keys}</p>"
