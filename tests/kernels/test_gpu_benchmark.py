"""``benchmarks/gpu`` in Triton's interpreter, without a GPU."""

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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpu_benchmark_without_gpu_exits_with_message(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("No GPU is available") and len(done.stderr.splitlines()) == 1


@pytest.mark.thorough
def test_gpu_benchmark_finds_no_errors_in_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run("--interpret", "--tune", "--out", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0, done.stdout
    assert {"device", "ops", "models", "graphs", "contract", "roofline tiny", "counterparts tiny"} <= set(results)
    assert not results["ops"]["wrong"] and not results["contract"]["wrong"]
    assert "of the roofline" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_failed_benchmark_part_is_reported_and_others_run(tmp_path: Path) -> None:
    done = run("--interpret", "--minutes", "60", "--parts", "nonsense,device", "--out", str(tmp_path))
    assert done.returncode == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert "nonsense" in results["nonsense"]["failure"] and results["device"]["limits"]["copy"] > 0
    assert "**nonsense failed**" in (tmp_path / "results.md").read_text()
