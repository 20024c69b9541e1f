"""Report of the results as Markdown and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KERNELS = "kernels: launches, µs each, share of time"


def markdown(results: dict[str, Any]) -> str:
    """Report of all parts, with failures first."""
    lines = ["# Penstock on a GPU", ""]
    device = results.get("device", {})
    if "properties" in device:
        limits = {f"measured {k}": f"{v / 1e12:.2f} T/s" for k, v in device["limits"].items()}
        lines += [", ".join(f"{name}: {value}" for name, value in (device["properties"] | limits).items()), ""]
    failed = {name: part["failure"] for name, part in results.items() if isinstance(part, dict) and "failure" in part}
    for name, failure in failed.items():
        lines += [f"**{name} failed**: {failure.strip().splitlines()[-1]}", ""]
    for name in ("ops", "contract"):
        parts = [part for part in parts_of(results, name) if "checks" in part]
        if parts:
            count, wrong = sum(part["count"] for part in parts), [each for part in parts for each in part["wrong"]]
            lines += [f"**{name}**: {count - len(wrong)} of {count} checks right.", ""]
            lines += [f"- wrong: {each}" for each in wrong] + [""] * bool(wrong)
    for name in ("models", "graphs"):
        items = [item for part in parts_of(results, name) if "failure" not in part for item in part.items()]
        if listed := [f"- {key}: {value}" for key, value in items if key != "seconds"]:
            lines += [f"**{name}**:", "", *listed, ""]
    rows, others = roofline_rows(results), counterpart_rows(results)
    if rows:
        lines += table(
            (
                "model",
                "format",
                "work",
                "ms",
                "tokens/s",
                "of copy bandwidth",
                "of products",
                "of the roofline",
                "idle",
            ),
            [
                (
                    row["model"],
                    row["format"],
                    *(
                        (row["work"], number(row["milliseconds"]), number(row["tokens/s"]))
                        if "work" in row
                        else (f"failed: {row['failure'].splitlines()[-1][:200]}", "", "")
                    ),
                    *(percent(row.get(key)) for key in ("of copy bandwidth", "of products", "of the roofline")),
                    percent(row.get("idle share, profiled")),
                )
                for row in rows
            ],
        )
    if others:
        own = {
            (row["model"], row["work"]): row["tokens/s"] for row in rows if row["format"] == "bf16" and "work" in row
        }
        listed = []
        for row in others:
            if "work" not in row:
                listed.append(
                    (row["system"], row["model"], f"failed: {row['failure'].splitlines()[-1][:200]}", "", "", "")
                )
                continue
            mine = own.get((row["model"], row["work"]))
            ratio = f"{mine / row['tokens/s']:.2f}" if mine else ""
            figures = number(row["milliseconds"]), number(row["tokens/s"]), ratio
            listed.append((row["system"], row["model"], row["work"], *figures))
        lines += table(("system (bf16)", "model", "work", "ms", "tokens/s", "Penstock is faster by"), listed)
    if "rows" in (tuned := results.get("tuning", {})):
        listed = []
        for row in tuned["rows"]:
            taken, least = row["microseconds"], row.get("its microseconds")
            if least and least < 0.97 * taken:
                listed.append(
                    (row["format"], row["matrix"], row["tokens"], number(taken), number(least), row["fastest other"])
                )
        lines += table(("format", "matrix", "tokens", "chosen, µs", "fastest, µs", "tile"), listed)
        bits = [f"{row['format']} {row['matrix']} {row['tokens']}" for row in tuned["rows"] if "other bits" in row]
        lines += [f"Matrix products for which some tile gives different bits: {', '.join(bits) or 'none'}", ""]
    kernels = [row for row in rows if row.get(KERNELS)]
    for row in kernels:
        lines += [f"Kernels of {row['model']}, {row['format']}, {row['work']}, profiled:", ""]
        lines += table(
            ("kernel", "launches", "µs each", "share of time"),
            [(name, launches, each, percent(share)) for name, launches, each, share in row[KERNELS]],
        )
    seconds = {name: part["seconds"] for name, part in results.items() if isinstance(part, dict) and "seconds" in part}
    lines.append("Seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    return "\n".join(lines) + "\n"


def parts_of(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Results of the processes of a part."""
    return [part for key, part in results.items() if key.split()[0] == name and isinstance(part, dict)]


def roofline_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for part in parts_of(results, "roofline") for row in part.get("rows", [])]


def counterpart_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for part in parts_of(results, "counterparts") for row in part.get("rows", [])]


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    if not rows:
        return []
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(map(str, cells))} |" for cells in lines] + [""]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: Any) -> str:
    return f"{value:.0%}" if isinstance(value, float) else ""


def draw(path: Path, results: dict[str, Any]) -> bool:
    """Draw each workload's share of the roofline, one panel per model. Returns False if matplotlib or results are
    missing."""
    rows = [row for row in roofline_rows(results) if "work" in row]
    try:
        import matplotlib
    except ImportError:
        return False
    if not rows:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(len(models), 1, figsize=(9, 3 * len(models)), squeeze=False, layout="constrained")
    for model, panel in zip(models, panels[:, 0], strict=True):
        own = [row for row in rows if row["model"] == model]
        works = list(dict.fromkeys(row["work"] for row in own))
        formats = list(dict.fromkeys(row["format"] for row in own))
        for number_, format in enumerate(formats):
            found = {row["work"]: row["of the roofline"] for row in own if row["format"] == format}
            at = [i + (number_ - (len(formats) - 1) / 2) * 0.8 / len(formats) for i in range(len(works))]
            panel.bar(at, [found.get(work, 0) for work in works], 0.75 / len(formats), label=format)
        panel.set_xticks(range(len(works)), works)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_title(f"{model}: share of the measured roofline", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8, ncols=len(formats))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
