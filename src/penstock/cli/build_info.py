"""What ``penstock --version`` tells: version, commit and the kernels' instruction set. It imports no torch."""

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
"""File with the commit: scripts/build_backend.py writes it, or who builds a package of files without their repository
(deploy/docker/Dockerfile)."""


def version_line() -> str:
    """For example ``0.0.1 (commit f74d6e3, kernels avx512bf16)``."""
    known = [f"commit {commit}"] if (commit := _commit()) else []
    return f"{__version__} ({', '.join([*known, f'kernels {_kernels()}'])})"


def _commit() -> str:
    """The commit that this installation is of: from git in a checkout, from the file ``COMMIT``, or from pip where it
    installed from a repository; empty where none tells."""
    checkout = PACKAGE.parents[1]
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""
    if COMMIT.exists():
        commit, dash, state = COMMIT.read_text().strip().partition("-")
        return commit[:12] + dash + state
    try:
        origin = json.loads(distribution("penstock-llm").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ""
    return str(origin.get("vcs_info", {}).get("commit_id", ""))[:12]


def _kernels() -> str:
    """The instruction set that the CPU kernels would take here; ``reference`` where there are none, and plain PyTorch
    computes."""
    name = "penstock.ops._kernels"
    for finder in sys.meta_path:  # import_module would import penstock.ops first, and with it torch
        if (spec := finder.find_spec(name, [str(PACKAGE / "ops")])) and spec.loader:
            try:
                kernels = module_from_spec(spec)
                spec.loader.exec_module(kernels)
            except ImportError:
                break
            requested = os.environ.get("PENSTOCK_ISA")
            return str(requested if requested in kernels.available() else kernels.current())
    return "reference"
