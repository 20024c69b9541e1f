"""Output of ``penstock --version``: version, commit and the kernels' instruction set. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec
from pathlib import Path

from penstock.version import __version__

PACKAGE = Path(__file__).parents[1]
COMMIT = PACKAGE / "COMMIT"
"""File with the commit, written by scripts/build_backend.py or deploy/docker/Dockerfile."""


def version_line() -> str:
    """Version, such as ``0.0.1 (commit f74d6e3, kernels avx512bf16)``."""
    known = [f"commit {found}"] if (found := commit()) else []
    return f"{__version__} ({', '.join([*known, f'kernels {_kernels()}'])})"


def commit() -> str:
    """Commit of this installation: from git in a checkout, from the file ``COMMIT``, or from pip if it installed from a
    repository. Empty if unknown."""
    checkout = PACKAGE.parents[1]
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""
    if COMMIT.exists():
        number, dash, state = COMMIT.read_text().strip().partition("-")
        return number[:12] + dash + state
    try:
        origin = json.loads(distribution("penstock-llm").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ""
    return str(origin.get("vcs_info", {}).get("commit_id", ""))[:12]


def _kernels() -> str:
    """Instruction set that the CPU kernels use on this machine; ``reference`` (plain PyTorch) without kernels."""
    name = "penstock.ops._kernels"
    for finder in sys.meta_path:  # import_module would also import penstock.ops, and torch with it
        if (spec := finder.find_spec(name, [str(PACKAGE / "ops")])) and spec.loader:
            try:
                kernels = module_from_spec(spec)
                spec.loader.exec_module(kernels)
            except ImportError:
                break
            requested = os.environ.get("PENSTOCK_ISA")
            return str(requested if requested in kernels.available() else kernels.current())
    return "reference"
