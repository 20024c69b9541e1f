"""The page of all options, from ``penstock.config.settings``."""

from __future__ import annotations

from typing import Any

from penstock.config.settings import Setting, settings

SECTIONS = {
    "engine": ("Engine", "The model, its device and precision, the KV cache, the scheduler, and who computes what."),
    "model": ("Model", "Text and requests of a model: tokenizer, templates, parsers, defaults of requests."),
    "server": ("Server", "Addresses, limits, keys, and what is served."),
    "log": ("Log", "What is written where."),
}


def options_page() -> str:
    """Markdown: a table of each section's options."""
    known = settings()
    parts = [
        "# Options\n\n"
        f"All {len(known)} options of `penstock serve`, with the defaults of this version. An option `max_num_seqs`\n"
        "is `--max-num-seqs` on the command line, `PENSTOCK_MAX_NUM_SEQS` in the environment, and `max_num_seqs` in\n"
        "the file of `--config`; the former override the latter. `LLM` and `AsyncLLM` take those of engine and model\n"
        "as arguments. `penstock config` shows each value and where it comes from; `--compat` takes the names of\n"
        "[other systems](../dialects.md)."
    ]
    for section, (title, about) in SECTIONS.items():
        rows = [_row(setting) for setting in known.values() if setting.section == section]
        parts.append(
            "\n".join([f"## {title}\n\n{about}\n\n| option | default | unit | meaning |", "|---|---|---|---|", *rows])
        )
    return "\n\n".join(parts) + "\n"


def _row(setting: Setting) -> str:
    choices = " One of " + ", ".join(f"`{choice}`" for choice in setting.choices) + "." if setting.choices else ""
    cells = [f"`{setting.flag}`", _default(setting), setting.unit, _escaped(setting.help) + choices]
    return "| " + " | ".join(cells) + " |"


def _default(setting: Setting) -> str:
    value: Any = setting.default
    if value in ("", (), None):
        return _escaped(setting.empty) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{','.join(map(str, value)) if isinstance(value, tuple) else value}`"


def _escaped(text: str) -> str:
    """Text of a table's cell, in which Markdown means nothing."""
    for character in "\\|<*_[":
        text = text.replace(character, f"\\{character}")
    return text
