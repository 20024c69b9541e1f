"""A shell in which commands from the documentation of other systems run unmodified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from penstock import demo
from penstock.cli.main import main


def write_programs(folder: Path) -> Path:
    """Create a folder for ``PATH`` with ``python``, ``penstock`` and the wrapper commands of ``penstock shims``."""
    assert main(["shims", str(folder)]) == 0
    calls = {"python": "", "python3": "", "penstock": "-m penstock.cli.main"}
    for name, call in calls.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


class Shell:
    """Runs Bash scripts with ``python``, ``penstock`` and the wrapper commands of ``penstock shims`` in ``PATH``.

    Args:
        folder: working directory of the scripts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = write_programs(folder / "bin")
        self.environment = {"PATH": f"{self.programs}:{os.environ['PATH']}"}

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env={**os.environ, **self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def output_of(self, script: str, **environment: str) -> str:
        """Run a script that must succeed; return its standard output."""
        result = self.run(script, **environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def command(self, script: str) -> list[str]:
        """Command that runs a script, for ``Served``; arguments are added to the script's last command."""
        return ["bash", "-c", f'cd "{self.folder}"\n{script.rstrip()} "$@"', "bash"]


def with_context_length(folder: Path, context: int) -> Path:
    """Create a folder with the built-in model and another ``max_position_embeddings``."""
    folder.mkdir()
    for file in demo.CHAT.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((demo.CHAT / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder
