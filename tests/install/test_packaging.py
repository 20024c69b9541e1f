"""``pyproject.toml`` declares exactly the dependencies that the package imports (see also ``make test-install``)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def imported(path: Path) -> frozenset[str]:
    """Top-level packages that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found)


def distribution(requirement: str) -> str:
    """Normalized name of a requirement's distribution."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def declared(requirements: list[str]) -> set[str]:
    return {distribution(requirement) for requirement in requirements}


@pytest.mark.slow
def test_imported_packages_are_declared() -> None:
    known = declared(PROJECT["dependencies"]).union(*map(declared, PROJECT["optional-dependencies"].values()))
    owners = packages_distributions()
    missing: dict[str, str] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for name in imported(path) - set(sys.stdlib_module_names) - {"penstock"}:
            if not known & {distribution(owner) for owner in owners.get(name, [name])}:
                missing[name] = str(path.relative_to(ROOT))
    assert not missing


def test_declared_dependencies_are_imported() -> None:
    """Except ``httptools``, which uvicorn uses."""
    owners = packages_distributions()
    names = {name for path in (ROOT / "src").rglob("*.py") for name in imported(path)}
    used = {distribution(owner) for name in names for owner in owners.get(name, ())} | {"httptools"}
    assert not declared(PROJECT["dependencies"]) - used


def test_install_hints_name_package_and_extras() -> None:
    """Messages name the package, which pip finds installed; documents also name a checkout (``.``)."""
    extras = set(PROJECT["optional-dependencies"])
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("README*.md")]
    hints = [hint for page in pages for hint in re.findall(r"pip install '([\w.-]+)\[([a-z]\w*)\]'", page.read_text())]
    assert hints and {extra for _, extra in hints} == extras
    assert {name for name, _ in hints} == {PROJECT["name"], "."}


def test_api_process_does_not_import_heavy_packages() -> None:
    """Packages that only some models or options need are imported on first use, to save start time and memory."""
    code = "import sys, penstock.serve.process.api_server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "PIL", "av", "sqlalchemy", "transformers", "grpc"} & set(loaded)
