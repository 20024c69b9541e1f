"""``benchmarks/gpu``, which runs on machines with a GPU: here in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("No GPU is available") and len(done.stderr.splitlines()) == 1


@pytest.mark.thorough
def test_every_part_is_right_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run("--interpret", "--tune", "--out", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0, done.stdout
    assert {"device", "ops", "models", "graphs", "contract", "roofline tiny", "counterparts tiny"} <= set(results)
    assert not results["ops"]["wrong"] and not results["contract"]["wrong"]
    assert "of the roofline" in (tmp_path / "results.md").read_text()


def test_a_part_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    done = run("--interpret", "--parts", "nonsense,device", "--out", str(tmp_path))
    assert done.returncode == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert "nonsense" in results["nonsense"]["failure"] and results["device"]["limits"]["copy"] > 0
    assert "**nonsense failed**" in (tmp_path / "results.md").read_text()
