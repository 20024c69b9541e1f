"""Building the package with a compiler, without one, and with a broken one; and the commit and the libraries of the web
page in built packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

pytest.importorskip("scikit_build_core", reason="the build tools are not installed (make installs them)")
pytest.importorskip("nanobind")

LIBRARIES = Path("src/penstock/serve/web/libraries")
TOOLS = [name for name in ("cmake", "ninja") if shutil.which(name)]
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The files of an sdist, with only ``__init__.py`` and ``version.py`` of the package."""
    folder = tmp_path / "penstock"
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for name in (".gitignore", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "scripts").mkdir()
    for name in ("build_backend.py", "web_libraries.py"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts")
    libraries = folder / LIBRARIES
    libraries.mkdir(parents=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / LIBRARIES / name, libraries)
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "src" / "penstock" / name, folder / "src" / "penstock")
    return folder


def build(sources: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Build a wheel as pip does; return the finished process and the compiled files in the wheel."""
    out = sources.parent / "wheels"
    done = subprocess.run(
        [sys.executable, "-c", f"from build_backend import build_wheel; build_wheel({str(out)!r})"],
        cwd=sources,
        env={name: value for name, value in os.environ.items() if name not in ("CXX", "PENSTOCK_SETS")}
        | {"PYTHONPATH": "scripts"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [name for wheel in out.glob("*.whl") for name in zipfile.ZipFile(wheel).namelist()]
    return done, [name for name in names if name.endswith(".so")]


def test_build_without_compiler_has_no_kernels_and_prints_note(sources: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    done, compiled = build(sources, PATH=str(tools))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not compiled
    assert "No C++ compiler was found" in done.stdout + done.stderr


def test_build_with_broken_compiler_fails(sources: Path) -> None:
    done, compiled = build(sources, CXX=str(shutil.which("false")))
    assert done.returncode != 0
    assert not compiled
    assert "is not able to compile" in done.stdout + done.stderr
    assert "No C++ compiler was found" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")
def test_build_with_broken_source_fails_with_compiler_error(sources: Path) -> None:
    header = sources / "csrc" / "kernels.h"
    header.write_text("#error broken on purpose\n" + header.read_text())
    done, compiled = build(sources, PENSTOCK_SETS="portable", CMAKE_BUILD_PARALLEL_LEVEL="1")
    assert done.returncode != 0
    assert not compiled
    assert re.search(r"kernels\.h:1:\d+: error:.*broken on purpose", done.stdout + done.stderr)


@pytest.mark.slow
def test_penstock_sets_none_omits_kernels_and_unknown_instruction_set_is_refused(sources: Path) -> None:
    done, compiled = build(sources, PENSTOCK_SETS="none", CXX=str(shutil.which("false")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not compiled
    done, _ = build(sources, PENSTOCK_SETS="avx9000")
    assert done.returncode != 0
    assert "avx9000 is not an instruction set" in " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_packages_contain_commit_of_checkout(sources: Path, tmp_path: Path) -> None:
    """An sdist, a wheel, and a wheel built from an sdist. The build leaves no file in the checkout."""

    def git(*arguments: str) -> str:
        config = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
        command = ["git", *config, *arguments]
        return subprocess.run(command, cwd=sources, check=True, capture_output=True, text=True).stdout

    git("init"), git("add", "."), git("commit", "-m", "All")
    commit = git("rev-parse", "--short", "HEAD").strip()
    code = f"from build_backend import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    environment = os.environ | {"PYTHONPATH": "scripts"}
    subprocess.run([sys.executable, "-c", code], cwd=sources, env=environment, check=True, capture_output=True)
    assert git("status", "--porcelain") == ""
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    done, _ = build(unpacked, PENSTOCK_SETS="none")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "unpacked" / "wheels").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert zipfile.ZipFile(wheel).read("penstock/COMMIT").decode() == commit + "\n"
    (sources / "README.md").write_text("changed")
    assert build(sources, PENSTOCK_SETS="none")[0].returncode == 0
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert zipfile.ZipFile(wheel).read("penstock/COMMIT").decode() == commit + "-dirty\n"


def contents(folder: Path) -> set[str]:
    """Files of the only wheel in a folder that belong to the web page's libraries."""
    (wheel,) = folder.glob("*.whl")
    prefix = "penstock/serve/web/libraries/files/"
    names = zipfile.ZipFile(wheel).namelist()
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_build_without_npm_has_no_libraries_and_prints_note(sources: Path, tmp_path: Path) -> None:
    done, _ = build(sources, PENSTOCK_SETS="none", PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "web page: npm was not found; it will show answers as plain text" in done.stderr
    assert not contents(tmp_path / "wheels")


@pytest.mark.slow
@needs_npm
def test_build_without_network_has_no_libraries_and_prints_note(sources: Path, tmp_path: Path) -> None:
    """Outdated libraries are not packaged either."""
    outdated = sources / LIBRARIES / "files" / "marked"
    outdated.mkdir(parents=True)
    (outdated / "old.js").write_text("old")
    unreachable = {"npm_config_registry": "http://127.0.0.1:9", "npm_config_cache": str(tmp_path / "cache")}
    done, _ = build(sources, PENSTOCK_SETS="none", **unreachable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "web page: npm failed" in done.stderr
    assert not contents(tmp_path / "wheels")


@pytest.mark.slow
@needs_npm
def test_wheel_has_libraries_and_licences_also_from_sdist_without_npm(sources: Path, tmp_path: Path) -> None:
    done, _ = build(sources, PENSTOCK_SETS="none")
    assert done.returncode == 0, done.stdout + done.stderr
    found = contents(tmp_path / "wheels")
    wanted = json.loads((ROOT / LIBRARIES / "package.json").read_text())["files"]
    assert {f"{package}/{name}" for package, names in wanted.items() for name in names} <= found
    assert {f"{package}/LICENSE" for package in wanted} <= found
    code = f"from build_backend import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    environment = os.environ | {"PYTHONPATH": "scripts"}
    subprocess.run([sys.executable, "-c", code], cwd=sources, env=environment, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "empty").mkdir()
    done, _ = build(unpacked, PENSTOCK_SETS="none", PATH=str(tmp_path / "empty"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(tmp_path / "unpacked" / "wheels") == found
