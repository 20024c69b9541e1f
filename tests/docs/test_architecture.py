"""docs/architecture.md names existing files, classes and functions, and its drawings are up to date."""

from __future__ import annotations

import re
import sys

import pytest
from repository import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
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


def test_architecture_page_names_existing_files() -> None:
    named = set(re.findall(r"`([\w./-]+\.(?:py|h|cc))`", PAGE))
    named |= set(re.findall(r"(?<![\w/`])((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h|cc))", PAGE))
    assert len(named) > 100
    assert not [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in FILES)]


def test_architecture_page_names_existing_identifiers() -> None:
    found = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", PAGE)
    named = {part for name in found if not name.endswith((".py", ".h", ".json")) for part in name.split(".")}
    identifiers = set(re.findall(r"\w+", CODE))
    assert not [name for name in named if re.search(r"[A-Z_]", name) and name not in identifiers]


def test_request_flow_functions_are_in_the_named_files() -> None:
    """Lines such as ``Engine.add   engine/engine.py``."""
    found = re.findall(r"^ +([A-Z]\w+)(?:\.(\w+))? +(\w+(?:/\w+)+\.py)", PAGE, re.MULTILINE)
    assert len(found) > 25
    for owner, method, path in found:
        text = (ROOT / "src/penstock" / path).read_text(encoding="utf-8")
        if method and f"class {owner}" not in text:  # the owner is an instance
            assert re.search(rf"def {method}\b", text), (owner, method, path)
        else:
            assert re.search(rf"\b(class|def) {method or owner}\b", text), (owner, method, path)


def test_architecture_table_lists_every_package() -> None:
    listed = set(re.findall(r"^\| `src/penstock/(\w+)/` \|", PAGE, re.MULTILINE))
    packages = {path.parent.name for path in (ROOT / "src/penstock").glob("*/__init__.py")}
    assert listed == packages


def test_drawings_are_up_to_date(drawings: dict[str, str]) -> None:
    """Update them with ``python scripts/docs drawings``."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/architecture").iterdir()}
    assert committed == drawings
    assert set(re.findall(r"\(architecture/([\w.]+)\)", PAGE)) == set(drawings)


def test_drawings_name_existing_classes(drawings: dict[str, str]) -> None:
    named = {
        name for text in drawings.values() for name in re.findall(r"\b[A-Z][a-z]*[A-Z]\w+", text.split("</style>")[1])
    }
    named -= {"API", "HTTP", "SQLite", "ZeroMQ"}
    assert {"EngineRequest", "KVCacheManager", "KVImports"} <= named
    assert not [name for name in named if not re.search(rf"class {name}\b", CODE)]
