"""Pages of docs/architecture name existing files, folders, classes and functions; their drawings are up to date."""

from __future__ import annotations

import re
import sys

import pytest
from repository import ROOT

FOLDER = ROOT / "docs/architecture"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
TEXT = "\n".join(PAGES.values())
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("src", "csrc", "tests", "benchmarks", "scripts", "docs", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
CODE = "\n".join(
    path.read_text(encoding="utf-8") for path in FILES.values() if path.suffix in (".py", ".h", ".cc", ".pyi")
)


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts/docs"), *sys.path])
    from drawings import drawings, layers

    assert layers()[0] == ["ray"]
    return drawings()


def test_named_files_exist() -> None:
    named = set(re.findall(r"`([\w./-]+\.(?:py|h|cc|json|toml|txt))`", TEXT)) - {"config.json", "tokenizer.json"}
    named |= set(re.findall(r"(?<![\w/`])((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h|cc))", TEXT))
    assert len(named) > 250
    known = [f"/{path}" for path in (*FILES, "CMakeLists.txt", "pyproject.toml", "zensical.toml")]
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in known)]


def test_named_folders_exist() -> None:
    named = set(re.findall(r"`((?:[\w.-]+/)+)`", TEXT))
    assert len(named) > 40
    known = {f"/{path.rsplit('/', 1)[0]}/" for path in FILES}
    assert not [name for name in named - {"build/"} if not any(f"/{name}" in folder for folder in known)]


def test_named_classes_and_functions_exist() -> None:
    found = re.findall(r"`([A-Za-z_]\w*(?:(?:\.|::)\w+)*)`", TEXT)
    suffixes = (".py", ".h", ".cc", ".json", ".txt", ".toml")
    named = {part for name in found if not name.endswith(suffixes) for part in re.split(r"\.|::", name)}
    assert len(named) > 150
    identifiers = set(re.findall(r"\w+", CODE))
    assert not [name for name in named if re.search(r"[A-Z_]", name) and name not in identifiers]


def test_functions_of_request_flow_are_in_their_files() -> None:
    """The page has lines such as ``Engine.add   engine/engine.py``."""
    found = re.findall(r"^ +([A-Z]\w+)(?:\.(\w+))? +(\w+(?:/\w+)+\.py)", PAGES["request.md"], re.MULTILINE)
    assert len(found) > 25
    for owner, method, path in found:
        text = (ROOT / "src/penstock" / path).read_text(encoding="utf-8")
        if method and f"class {owner}" not in text:  # the owner is an instance, not a class
            assert re.search(rf"def {method}\b", text), (owner, method, path)
        else:
            assert re.search(rf"\b(class|def) {method or owner}\b", text), (owner, method, path)


def test_table_of_packages_has_every_package() -> None:
    listed = set(re.findall(r"^\| `src/penstock/(\w+)/` \|", PAGES["index.md"], re.MULTILINE))
    assert listed == {path.parent.name for path in (ROOT / "src/penstock").glob("*/__init__.py")}


def test_table_of_tests_has_every_folder() -> None:
    listed = set(re.findall(r"^\| `tests/(\w+)/` \|", PAGES["tests.md"], re.MULTILINE))
    assert listed == {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}


def test_overview_links_every_page() -> None:
    linked = set(re.findall(r"^\| \[[^]]+\]\((\w+\.md)\) \|", PAGES["index.md"], re.MULTILINE))
    assert linked == PAGES.keys() - {"index.md"}


def test_drawings_are_up_to_date(drawings: dict[str, str]) -> None:
    """Update the drawings with ``python scripts/docs drawings``."""
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")} == drawings
    assert set(re.findall(r"\(([\w.]+\.svg)\)", TEXT)) == set(drawings)


def test_classes_of_drawings_exist(drawings: dict[str, str]) -> None:
    named = {
        name for text in drawings.values() for name in re.findall(r"\b[A-Z][a-z]*[A-Z]\w+", text.split("</style>")[1])
    }
    named -= {"API", "HTTP", "SQLite", "ZeroMQ"}
    assert {"EngineRequest", "KVCacheManager", "KVImports"} <= named
    assert not [name for name in named if not re.search(rf"class {name}\b", CODE)]
