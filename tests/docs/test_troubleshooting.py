"""Messages and options quoted in docs/troubleshooting.md exist in Penstock's sources."""

from __future__ import annotations

import re

import pytest
from repository import ROOT

from penstock.config.settings import settings

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
OTHER_OPTIONS = set(
    "--gpus --cpus --no-cache-dir --force-reinstall --no-deps --help --version --url --once --compat --config".split()
)
"""Options of docker, pip and Penstock's commands that are not in ``settings()``."""


def message_cells() -> list[str]:
    """Messages of the page: the code in the first cell of each row."""
    rows = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row) if len(code) > 15]


def sources() -> str:
    """Text of Penstock's string literals: adjacent literals are joined, and values are ``…``."""
    files = [*sorted((ROOT / "src/penstock").rglob("*.py")), *sorted((ROOT / "csrc").glob("*.cc"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text = re.sub(r"""["']\s*\n\s*f?["']""", "", text)
    text = re.sub(r"\{[^{}\n]*\}|%(?:\.\d)?[sdgfr]", "…", text)
    return text.replace('\\"', '"')


TEXT = sources()
PUNCTUATION = "(): ,;."
MIN_LENGTH = 7
"""Minimum characters of a literal: shorter literals would match any message."""


def is_printed(part: str) -> bool:
    """True if a part of a message is a literal of the sources, or a sequence of several literals."""
    part = re.sub(r"^\w+: ", "", part).strip(PUNCTUATION)
    if part in TEXT:
        return True
    ends = [match.start() for match in re.finditer(" ", part)]
    return any(
        part[:end].strip(PUNCTUATION) in TEXT and is_printed(part[end:])
        for end in ends
        if min(end, len(part) - end) >= MIN_LENGTH
    )


@pytest.mark.parametrize("message", message_cells())
def test_quoted_message_is_in_the_sources(message: str) -> None:
    parts = [part for part in message.split("…") if len(part.strip(PUNCTUATION)) >= MIN_LENGTH]
    assert parts
    assert not [part for part in parts if not is_printed(part)]


def test_options_of_the_page_exist() -> None:
    known = {setting.flag for setting in settings().values()} | OTHER_OPTIONS
    assert not set(re.findall(r"--[a-z][a-z-]+", PAGE)) - known
