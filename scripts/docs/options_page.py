"""Reference page of all options, from ``penstock.config.settings``."""

from __future__ import annotations

from typing import Any

from penstock.config.settings import Setting, settings

SECTIONS = {
    "engine": ("Engine", "Model, device, precision, KV cache, scheduler, and parallelism."),
    "model": ("Model", "Tokenizer, chat templates, parsers, media, and defaults of requests."),
    "server": ("Server", "Addresses, limits, API keys, and served models."),
    "log": ("Log", "Log levels, formats and files."),
}


def options_page() -> str:
    """Markdown page with a table of options per section."""
    known = settings()
    parts = [
        "# Options\n\n"
        f"All {len(known)} options of `penstock serve`, with the defaults of this version. The option `max_num_seqs`\n"
        "is `--max-num-seqs` on the command line, `PENSTOCK_MAX_NUM_SEQS` in the environment, and `max_num_seqs` in\n"
        "the file of `--config`, in order of precedence. `LLM` and `AsyncLLM` take the options of the engine and the\n"
        "model as arguments. `penstock config` shows all values and their sources; `--compat` accepts the option\n"
        "names of [other systems](../dialects.md)."
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
    """Escape Markdown characters in the text of a table cell."""
    for character in "\\|<*_[":
        text = text.replace(character, f"\\{character}")
    return text
