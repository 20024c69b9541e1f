"""Selection of the CPU instruction set, and warnings about kernels that do not match their sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from penstock.core import PenstockError

native = pytest.importorskip("penstock.ops.native", reason="the CPU kernels were not built", exc_type=ImportError)
kernels = native._kernels


def penstock(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "portable" else pytest.mark.thorough) for name in kernels.available()],
)
def test_instruction_set_of_environment_is_used(name: str) -> None:
    found = json.loads(penstock("doctor", "--json", PENSTOCK_ISA=name).stdout)
    assert found["isa"] == f"{name} (PENSTOCK_ISA)"
    assert found["fingerprint"].startswith(f"cpu-{name}-")


def test_unavailable_instruction_set_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result = penstock("serve", "--port", "0", PENSTOCK_ISA="avx9000")
    known = ", ".join(kernels.BUILT)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1:] == [
        f"penstock serve: PENSTOCK_ISA=avx9000: this build has no kernels for avx9000; it has kernels for {known}"
    ]
    for name in set(kernels.BUILT) - set(kernels.MACHINE):
        monkeypatch.setenv("PENSTOCK_ISA", name)
        with pytest.raises(PenstockError, match=f"this processor does not support {name}; it supports portable"):
            native.set_up()


def test_outdated_kernels_are_reported_unless_installed_from_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    monkeypatch.setattr(kernels, "SOURCES", native.hash_of_sources(ROOT))
    assert native.outdated_warning() is None
    with open(tmp_path / "csrc" / "kernels.cc", "a") as file:
        file.write("// changed\n")
    assert "pip install -e ." in native.outdated_warning()
    monkeypatch.setattr(native, "SOURCES", tmp_path / "csrc")  # a wheel has no sources
    assert native.outdated_warning() is None
    monkeypatch.setattr(kernels, "VERSION", "0.0.0")
    assert "version 0.0.0" in native.outdated_warning()
    monkeypatch.setattr(kernels, "VERSION", "")
    monkeypatch.setattr(kernels, "MACHINE", [*kernels.MACHINE, "avx1024"])
    monkeypatch.delenv("PENSTOCK_ISA", raising=False)
    assert "without avx1024" in native.outdated_warning()


def test_kernels_are_built_from_current_sources() -> None:
    """Fails if the installed kernels were built from older sources; reinstall the package."""
    assert native.hash_of_sources(ROOT) == kernels.SOURCES
