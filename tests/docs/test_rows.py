"""Every row of the tables for those who come from another system has a test, which names it: ``@pytest.mark.row``."""

import ast
import re
from functools import cache

import pytest
from repository import ROOT, TESTS

SYSTEMS = sorted(path.stem for path in (ROOT / "docs/dialects").glob("*.md"))


def rows(text: str) -> list[str]:
    """Of all tables: the code in a row's first cell, or the cell where it has none."""
    found: list[str] = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("|") and any(re.fullmatch(r"\|[-|: ]+\|", above) for above in table_above(lines, i)):
            first = line.removeprefix("|").split(" | ")[0].strip().strip("|").strip()
            found += re.findall(r"`([^`]+)`", first) or [first]
    return [row for row in found if row]


def table_above(lines: list[str], i: int) -> list[str]:
    """The lines of the table above this one."""
    start = i
    while start and lines[start - 1].startswith("|"):
        start -= 1
    return lines[start:i]


@cache
def marks() -> list[list[str]]:
    """The arguments of all marks."""
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    nodes = [node for text in texts if "pytest.mark.row(" in text for node in ast.walk(ast.parse(text))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row"]
    return [[ast.literal_eval(argument) for argument in call.args] for call in calls]


def marked(system: str) -> set[str]:
    """The rows that tests say they are of."""
    return {name for of, *names in marks() for name in names if of == system}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_dialect_table_row_has_a_test(system: str) -> None:
    said = rows((ROOT / f"docs/dialects/{system}.md").read_text())
    assert not [row for row in said if row not in marked(system)]


@pytest.mark.parametrize("system", SYSTEMS)
def test_row_marks_name_existing_rows(system: str) -> None:
    assert not marked(system) - set(rows((ROOT / f"docs/dialects/{system}.md").read_text()))


@pytest.mark.parametrize("system", SYSTEMS)
def test_chinese_dialect_tables_have_same_rows(system: str) -> None:
    """Those that are named by code; words are said in the other language."""
    english, chinese = (
        [row for row in re.findall(r"^\| (`.*)$", (ROOT / folder / f"{system}.md").read_text(), flags=re.M)]
        for folder in ("docs/dialects", "docs/zh/dialects")
    )
    first = [[re.findall(r"`([^`]+)`", row.split(" | ")[0]) for row in table] for table in (english, chinese)]
    assert first[0] == first[1]


@pytest.mark.parametrize("page", ["README", "docs/dialects"])
def test_chinese_page_has_same_commands_and_tables(page: str) -> None:
    chinese = {"README": "README.zh-CN.md", "docs/dialects": "docs/zh/dialects.md"}[page]
    texts = [(ROOT / name).read_text() for name in (f"{page}.md", chinese)]
    if page == "README":
        assert len({tuple(re.findall(r"^```.*?^```", text, flags=re.M | re.S)) for text in texts}) == 1
    assert len({sum(line.startswith("|") for line in text.splitlines()) for text in texts}) == 1
    for name, text in zip((f"{page}.md", chinese), texts, strict=True):
        for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", text):
            assert ((ROOT / name).parent / target).exists(), (name, target)
