"""Charts of the results: bars of speed, and speed against perplexity."""

from __future__ import annotations

from pathlib import Path

OURS = "Penstock"
WITH_PEERS_FILE = f"{OURS} (GGUF file)"
"""Name of Penstock with llama.cpp's GGUF file."""
COLOURS = {
    OURS: "#0b7285",
    WITH_PEERS_FILE: "#66a9b5",
    "OpenVINO": "#adb5bd",
    "vLLM": "#868e96",
    "llama.cpp": "#ced4da",
}

FRONTIER_COLOURS = {OURS: "#0b7285", "OpenVINO": "#e8590c", "llama.cpp": "#495057", "ik_llama.cpp": "#862e9c"}
"""Colors of the points of the frontier by system."""


def draw(path: Path, rates: dict[str, dict[str, float]], formats: list[str]) -> None:
    """Draw bars of the rates, one panel per format. The rates are relative to Penstock's, since works differ by orders
    of magnitude."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(formats), 1, figsize=(9, 2.6 * len(formats)), squeeze=False, layout="constrained")
    for format, panel in zip(formats, panels[:, 0], strict=True):
        own = {name.rsplit(" ", 1)[0]: r for name, r in rates.items() if name.endswith(f" {format}")}
        works, width = list(own[OURS]), 0.8 / len(own)
        for number, (name, found) in enumerate(own.items()):
            shares = [found.get(work, 0) / own[OURS][work] for work in works]
            at = [i + (number - (len(own) - 1) / 2) * width for i in range(len(works))]
            bars = panel.bar(at, shares, width * 0.92, label=name, color=COLOURS[name])
            labels = [f"{found[work]:.0f}" if work in found else "" for work in works]
            panel.bar_label(bars, labels, fontsize=7, padding=1)
        panel.set_xticks(range(len(works)), works)
        panel.set_title(f"{format}: tokens per second, Penstock = 1", loc="left", fontsize=10)
        panel.margins(y=0.15)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8, ncols=len(own), loc="upper right", bbox_to_anchor=(1, 1.2))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_frontier(path: Path, losses: dict[str, float], rates: dict[str, dict[str, float]]) -> None:
    """Draw speed against perplexity, one panel per work; the upper left is better.

    Args:
        losses: perplexity relative to 16 bits, by ``system:format``.
        rates: tokens per second by work and ``system:format``.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(rates), figsize=(4.6 * len(rates), 4.4), squeeze=False, layout="constrained")
    for (work, found), panel in zip(rates.items(), panels[0], strict=True):
        for system in dict.fromkeys(name.split(":")[0] for name in found):
            own = [name for name in found if name.split(":")[0] == system]
            colour = FRONTIER_COLOURS.get(system, "#868e96")
            panel.scatter(
                [losses[name] for name in own], [found[name] for name in own], color=colour, label=system, s=22
            )
            for name in own:
                at = losses[name], found[name]
                panel.annotate(
                    name.split(":")[1], at, xytext=(3, 3), textcoords="offset points", fontsize=6, color=colour
                )
        panel.set_title(f"{work}: tokens/s", loc="left", fontsize=10)
        panel.set_xlabel("perplexity relative to 16 bits")
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
