"""Every row of the tables in docs/dialects has a test that names it with ``@pytest.mark.row(system, row, ...)``."""

import ast
import re
from functools import cache

import pytest
from repository import ROOT, TESTS

SYSTEMS = sorted(path.stem for path in (ROOT / "docs/dialects").glob("*.md"))


def rows(text: str) -> list[str]:
    """Names of the rows of all tables: the code in the first cell, or the text of a first cell without code."""
    found: list[str] = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("|") and any(re.fullmatch(r"\|[-|: ]+\|", above) for above in table_above(lines, i)):
            first = line.removeprefix("|").split(" | ")[0].strip().strip("|").strip()
            found += re.findall(r"`([^`]+)`", first) or [first]
    return [row for row in found if row]


def table_above(lines: list[str], i: int) -> list[str]:
    """Lines of the table above line ``i``."""
    start = i
    while start and lines[start - 1].startswith("|"):
        start -= 1
    return lines[start:i]


@cache
def marks() -> list[list[str]]:
    """Arguments of all ``row`` marks of the tests: a system and names of rows."""
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    nodes = [node for text in texts if "pytest.mark.row(" in text for node in ast.walk(ast.parse(text))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row"]
    return [[ast.literal_eval(argument) for argument in call.args] for call in calls]


def marked(system: str) -> set[str]:
    """Rows of a system that tests name."""
    return {name for mark_system, *names in marks() for name in names if mark_system == system}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_dialect_table_row_has_a_test(system: str) -> None:
    documented = rows((ROOT / f"docs/dialects/{system}.md").read_text())
    assert not [row for row in documented if row not in marked(system)]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_mark_refers_to_documented_row(system: str) -> None:
    assert not marked(system) - set(rows((ROOT / f"docs/dialects/{system}.md").read_text()))


@pytest.mark.parametrize("system", SYSTEMS)
def test_chinese_dialect_tables_have_same_rows(system: str) -> None:
    """Only rows named by code are compared; other names are translated."""
    english, chinese = (
        [row for row in re.findall(r"^\| (`.*)$", (ROOT / folder / f"{system}.md").read_text(), flags=re.M)]
        for folder in ("docs/dialects", "docs/zh/dialects")
    )
    first = [[re.findall(r"`([^`]+)`", row.split(" | ")[0]) for row in table] for table in (english, chinese)]
    assert first[0] == first[1]


@pytest.mark.parametrize(
    "page",
    [
        "README",
        "docs/installation",
        "docs/feature_list",
        "docs/features",
        "docs/dialects",
        "docs/deployment",
        "docs/monitoring",
        "docs/troubleshooting",
        "docs/serving/index",
        "docs/serving/several_models",
        "docs/serving/models",
        "docs/serving/requests",
        "docs/serving/security",
        "docs/serving/changing_weights",
        "docs/serving/parallelism",
        "docs/serving/prefill_decode",
        "docs/serving/health",
        "docs/serving/failures",
        "docs/serving/prefix_cache",
    ],
)
def test_chinese_page_has_same_commands_and_tables(page: str) -> None:
    """Blocks without a language, such as diagrams, are translated."""
    chinese = "README.zh-CN.md" if page == "README" else f"docs/zh/{page.removeprefix('docs/')}.md"
    texts = [(ROOT / name).read_text() for name in (f"{page}.md", chinese)]
    if page != "docs/dialects":  # the comments in its commands are translated
        assert len({tuple(re.findall(r"^```\w.*?^```", text, flags=re.M | re.S)) for text in texts}) == 1
    assert len({sum(line.startswith("|") for line in text.splitlines()) for text in texts}) == 1
    for name, text in zip((f"{page}.md", chinese), texts, strict=True):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
            assert ((ROOT / name).parent / target).exists(), (name, target)
