"""A folder and a search path in which commands of other systems' documents run as they are printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from penstock import demo
from penstock.cli.main import main


def write_programs(folder: Path) -> Path:
    """A folder for the search path, made here: ``python``, ``penstock``, and what ``penstock shims`` writes."""
    assert main(["shims", str(folder)]) == 0
    calls = {"python": "", "python3": "", "penstock": "-m penstock.cli.main"}
    for name, call in calls.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


class Shell:
    """Commands find ``python``, ``penstock`` and those that shims stand for.

    Args:
        folder: where they run.
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
        """What a script that succeeds prints."""
        ran = self.run(script, **environment)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def command(self, script: str) -> list[str]:
        """For ``Served``, which adds a host and a port to the script's last command."""
        return ["bash", "-c", f'cd "{self.folder}"\n{script.rstrip()} "$@"', "bash"]


def with_context_length(folder: Path, context: int) -> Path:
    """The model in the box with a longer context, as documents ask for."""
    folder.mkdir()
    for file in demo.CHAT.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((demo.CHAT / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder
