"""SVG drawings of docs/architecture, written by ``python scripts/docs drawings``.

The drawing of packages is generated from import-linter's layers in pyproject.toml. The other drawings are defined here:
boxes on a grid, and arrows between their edges.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from pages import ROOT, write_file

FOLDER = ROOT / "docs/architecture"
UNIT = 20
"""Grid spacing in pixels."""
LINE = 17
"""Line spacing of text in pixels."""
STYLE = """\
svg { font: 13px system-ui, sans-serif; }
rect { fill: #f6f8fa; stroke: #57606a; }
.strong { fill: #ddf4ff; stroke: #0969da; }
.store { fill: #fff8c5; stroke: #9a6700; }
.group { fill: none; stroke-dasharray: 5 4; }
text { fill: #1f2328; } .title { font-weight: 600; } .label, .small { fill: #57606a; font-size: 12px; }
path { fill: none; stroke: #57606a; stroke-width: 1.4; } marker path { fill: #57606a; stroke: none; }
.back { fill: #ffffff; stroke: none; }
@media (prefers-color-scheme: dark) {
rect { fill: #21262d; stroke: #8b949e; } .strong { fill: #0c2d6b; stroke: #58a6ff; }
.store { fill: #3b2e00; stroke: #d29922; } .group { fill: none; } text { fill: #e6edf3; }
.label, .small { fill: #9da7b3; } path { stroke: #8b949e; } marker path { fill: #8b949e; }
.back { fill: #0d1117; }
}"""
CONTENTS = {
    "ray": "Ray Serve",
    "cli": "commands",
    "serve": "HTTP, gRPC, dialects, storage, metrics",
    "frontend": "LLM, AsyncLLM, Gateway, media",
    "cluster": "rank tables",
    "engine": "scheduler, KV cache, workers",
    "calibration": "penstock quantize",
    "tracing": "spans of requests",
    "models": "a file per family",
    "layers": "attention, MLP, experts",
    "quant": "weight formats",
    "parallel": "ranks, stages",
    "ops": "kernels: reference, cpu, cuda",
    "text": "tokenizer, templates, parsers",
    "config": "options, profiles",
    "checkpoint": "config.json, headers",
    "planning": "sizes of models and caches",
    "core": "requests, outputs, errors",
    "demo": "built-in model",
    "version": "",
}
"""Short description of each package, shown in its box."""


class Box(NamedTuple):
    """Box with a title and lines of text. Positions and sizes are in grid units."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: tuple[str, ...] = ()
    kind: str = ""
    """CSS class: strong, store, group (title at the top left), or empty."""


class Arrow(NamedTuple):
    """Arrow along points ``(x, y)`` in grid units, with a label in the middle."""

    points: tuple[tuple[float, float], ...]
    label: str = ""
    both: bool = False
    """True for an arrow with two heads."""
    shift: tuple[float, float] = (0, 0)
    """Offset of the label from the middle, in grid units."""


class Drawing(NamedTuple):
    width: float
    height: float
    about: str
    """Text alternative for screen readers (``title`` of the SVG)."""
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...] = ()


def drawings() -> dict[str, str]:
    """SVG of each drawing by file name."""
    found = {"packages": _packages(), "processes": PROCESSES, "step": STEP, "prefill_decode": PREFILL_DECODE}
    return {f"{name}.svg": _svg(drawing) for name, drawing in found.items()}


def write_drawings() -> None:
    for name, text in drawings().items():
        write_file(FOLDER / name, text)


def layers() -> list[list[str]]:
    """Packages of each layer, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(contract["layers"] for contract in contracts if contract.get("containers") == ["penstock"])
    return [[name.strip() for name in layer.split("|")] for layer in found]


def _packages() -> Drawing:
    boxes, y = [], 0.5
    all_layers = layers()
    for layer in all_layers:
        width = 42 / len(layer)
        for i, name in enumerate(layer):
            kind = "strong" if name == "engine" else ""
            lines = (CONTENTS[name],) if CONTENTS[name] else ()
            boxes.append(Box(0.5 + i * width, y, width - 0.4, 2.2, name, lines, kind))
        y += 2.6
    boxes.append(Box(0.5, y, 20.6, 2.2, "csrc/", ("C++ kernels per instruction set",)))
    height = len(all_layers) * 2.6
    arrow = Arrow(((43.3, 0.5), (43.3, height)), "imports", shift=(1.8, 0))
    about = "Packages by layer: a package imports only from lower layers. From top to bottom: " + "; ".join(
        ", ".join(layer) for layer in all_layers
    )
    return Drawing(48, y + 2.8, about, tuple(boxes), (arrow,))


PROCESSES = Drawing(
    50,
    23.5,
    "A supervisor starts and monitors API processes and one engine process per model. Clients use API processes, "
    "which connect to the engine over ZeroMQ; the engine communicates with rank processes over rings in shared memory.",
    (
        Box(14, 0.5, 21, 3, "supervisor", ("opens ports; starts, monitors, restarts",)),
        Box(0.5, 8.5, 6.5, 5, "clients", ("HTTP", "gRPC")),
        Box(11, 6.5, 12, 9.5, "API processes", (), "group"),
        Box(
            12,
            8,
            10,
            7.3,
            "API process",
            ("HTTP, dialects", "templates, tokenizer", "detokenizer, parsers", "no torch"),
        ),
        Box(
            27,
            6.5,
            10,
            9.5,
            "engine process",
            ("scheduler", "KV cache manager", "prefix cache", "grammars", "no text processing"),
            "strong",
        ),
        Box(40, 5.5, 9, 11.5, "worker processes", (), "group"),
        Box(41, 7, 7, 3.5, "rank 0", ("model, sampler",), "strong"),
        Box(41, 12.5, 7, 3.5, "rank N", ("model, sampler",), "strong"),
        Box(11, 19, 12, 3.6, "storage", ("SQLite or another database,", "folder of files"), "store"),
        Box(39, 19, 10.5, 3.6, "weight cache", ("packed weights, mapped",), "store"),
    ),
    (
        Arrow(((7, 11), (12, 11)), both=True),
        Arrow(((22, 11), (27, 11)), "ZeroMQ", both=True, shift=(0, -0.8)),
        Arrow(((37, 8.7), (41, 8.7)), "rings", both=True, shift=(-0.6, -0.8)),
        Arrow(((37, 14.2), (41, 14.2)), both=True),
        Arrow(((44.5, 10.5), (44.5, 12.5)), "gather", both=True, shift=(2, 0)),
        Arrow(((17, 3.5), (17, 6.5)), "models, weights", shift=(-3.2, 0)),
        Arrow(((32, 3.5), (32, 6.5)), "heartbeat", both=True, shift=(2.6, 0)),
        Arrow(((17, 15.3), (17, 19)), both=True),
        Arrow(((44.5, 19), (44.5, 16))),
    ),
)
STEP = Drawing(
    48,
    21,
    "One step: the scheduler plans the tokens and KV blocks of each sequence, workers compute and sample, the "
    "scheduler appends the tokens, and deltas are sent to the clients; then the next step follows.",
    (
        Box(0.5, 1, 10, 4, "requests", ("EngineRequest: token ids,", "SamplingParams")),
        Box(0.5, 8, 10, 4, "WaitingQueue", ("new and preempted", "sequences")),
        Box(
            15,
            1,
            14,
            5,
            "Scheduler.schedule",
            ("one token budget for prefill,", "decode and drafts;", "blocks of KVCacheManager"),
            "strong",
        ),
        Box(33.5, 1, 14, 5, "StepBuilder.build", ("Plan ─► StepInput:", "only changes"), ""),
        Box(
            33.5,
            9,
            14,
            5.5,
            "Worker.execute",
            ("InputBatch: a flat batch", "ModelRunner: layers, ops", "Sampler, accepted drafts"),
            "strong",
        ),
        Box(15, 9, 14, 5.5, "Scheduler.update", ("appends tokens, frees", "blocks of finished", "sequences"), "strong"),
        Box(0.5, 16, 10, 4, "clients", ("TokenDelta: ids,", "logprobs, reason")),
        Box(15, 17, 14, 3, "block pool, prefix cache", ("counts references, evicts",), "store"),
    ),
    (
        Arrow(((5.5, 5), (5.5, 8)), "Scheduler.add", shift=(3.2, 0)),
        Arrow(((10.5, 10), (12.7, 10), (12.7, 3.5), (15, 3.5))),
        Arrow(((29, 3.5), (33.5, 3.5)), "Plan", shift=(0, -0.8)),
        Arrow(((40.5, 6), (40.5, 9)), "submit", shift=(2, 0)),
        Arrow(((33.5, 11.7), (29, 11.7)), "collect", shift=(0, -0.8)),
        Arrow(((22, 9), (22, 6)), "next step", shift=(2.4, 0)),
        Arrow(((15, 13), (12.7, 13), (12.7, 18), (10.5, 18))),
        Arrow(((22, 14.5), (22, 17)), both=True),
    ),
)
PREFILL_DECODE = Drawing(
    47,
    17.5,
    "Clients send requests to a router, which has no model. It sends each request to a decode instance with a list of "
    "prefill instances; the decode engine pulls the KV cache of the prompt from a prefill engine.",
    (
        Box(0.5, 6.5, 6.5, 4, "clients"),
        Box(
            11,
            5.5,
            11,
            6,
            "router",
            ("API processes, EnginePool;", "chooses by load, room", "and cached prefixes"),
            "",
        ),
        Box(
            30,
            0.5,
            16,
            5.5,
            "decode instance",
            ("KVImports: allocate, pull;", "or compute the prompt", "locally"),
            "strong",
        ),
        Box(
            30,
            11.5,
            16,
            5.5,
            "prefill instance",
            ("KVExports: copies layers to", "the transfer buffer as they", "are computed"),
            "strong",
        ),
    ),
    (
        Arrow(((7, 8.5), (11, 8.5)), both=True),
        Arrow(((22, 7), (26, 7), (26, 3.2), (30, 3.2)), "requests, tokens", both=True, shift=(-3.2, -2.3)),
        Arrow(((22, 10), (26, 10), (26, 14.2), (30, 14.2)), "statistics", shift=(-2.4, 2.3)),
        Arrow(((38, 6), (38, 11.5)), "Start: a prompt", shift=(-3.6, 0)),
        Arrow(((40, 11.5), (40, 6)), "KV cache", shift=(2.6, 0)),
    ),
)


def _svg(drawing: Drawing) -> str:
    width, height = drawing.width * UNIT, drawing.height * UNIT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    marker = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker>'
    )
    parts: list[str] = [head, f"<title>{escape(drawing.about)}</title>", f"<style>{STYLE}</style>", marker]
    parts.append(f'<rect class="back" width="{width:g}" height="{height:g}"/>')
    parts += [line for box in drawing.boxes for line in _box(box)]
    parts += [line for arrow in drawing.arrows for line in _arrow(arrow)]
    return "\n".join([*parts, "</svg>", ""])


def _box(box: Box) -> Iterator[str]:
    x, y, width, height = (value * UNIT for value in box[:4])
    kind = f' class="{box.kind}"' if box.kind else ""
    yield f'<rect{kind} x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    if box.kind == "group":
        yield f'<text class="small" x="{x + 8:g}" y="{y + 18:g}">{escape(box.title)}</text>'
        return
    top = y + height / 2 - LINE * len(box.lines) / 2 + 5
    yield from _texts(x + width / 2, top, [box.title], "title")
    yield from _texts(x + width / 2, top + LINE, box.lines, "small")


def _arrow(arrow: Arrow) -> Iterator[str]:
    points = [(x * UNIT, y * UNIT) for x, y in arrow.points]
    line = "L".join(f"{x:g} {y:g}" for x, y in points)
    start = ' marker-start="url(#head)"' if arrow.both else ""
    yield f'<path d="M{line}" marker-end="url(#head)"{start}/>'
    if arrow.label:
        (x0, y0), (x1, y1) = points[0], points[-1]
        middle = (x0 + x1) / 2 + arrow.shift[0] * UNIT, (y0 + y1) / 2 + arrow.shift[1] * UNIT + 4
        yield from _texts(*middle, [arrow.label], "label")


def _texts(x: float, y: float, lines: Iterable[str], kind: str) -> Iterator[str]:
    for i, line in enumerate(lines):
        yield f'<text class="{kind}" x="{x:g}" y="{y + i * LINE:g}" text-anchor="middle">{escape(line)}</text>'
