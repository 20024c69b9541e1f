"""Pages about moving from other systems: options exist, and clients' fields are those of the dialects."""

from __future__ import annotations

import re

import pytest
from repository import ROOT

from penstock.config.settings import settings
from penstock.serve.dialects.ollama.convert import NEUTRAL, OPTIONS, WITHOUT_EFFECT

GUIDES = ("from_llama_cpp", "from_ollama")
OF_COMMANDS = {"--url", "--chat", "--model"}
"""Options of commands other than ``serve``."""


def table_rows(guide: str) -> list[list[str]]:
    """Cells of all tables."""
    text = (ROOT / f"docs/cookbook/{guide}.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("guide", GUIDES)
def test_options_of_the_tables_exist(guide: str) -> None:
    known = {setting.flag for setting in settings().values()} | OF_COMMANDS
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    named = {flag for row in table_rows(guide) for cell in row[1:] for flag in re.findall(r"--[a-z][a-z-]+", cell)}
    foreign = {"--repeat-last-n"}  # named because it does not exist
    assert len(named) > 10
    assert named - known <= foreign


def test_parameters_of_modelfiles_are_options_of_ollama() -> None:
    rows = [row[0] for row in table_rows("from_ollama") if "PARAMETER" in row[0]]
    named = {name for row in rows for name in re.findall(r"[a-z]+(?:_[a-z]+)?", row.replace("PARAMETER", ""))}
    assert named <= {*OPTIONS, *WITHOUT_EFFECT, *NEUTRAL, "num_predict"}


def test_environment_variables_are_named_after_options() -> None:
    known = {f"PENSTOCK_{name.upper()}" for name in settings()}
    for guide in GUIDES:
        text = (ROOT / f"docs/cookbook/{guide}.md").read_text(encoding="utf-8")
        named = set(re.findall(r"PENSTOCK_[A-Z_]+[A-Z]", text))
        assert named and named <= known
