"""A folder and a search path in which commands of other systems' documents run as they are printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from penstock import demo

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


class Shell:
    """Commands find ``python`` and those that the package installs.

    Args:
        folder: where they run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        lines = {name: f'"{sys.executable}" "$@"' for name in ("python", "python3")}
        for name, place in scripts.items():
            module, _, function = place.partition(":")
            code = f"import sys; from {module} import {function}; sys.argv[0] = '{name}'; sys.exit({function}())"
            lines[name] = f'"{sys.executable}" -c "{code}" "$@"'
        for name, line in lines.items():
            (programs / name).write_text(f"#!/bin/sh\nexec {line}\n")
            (programs / name).chmod(0o755)
        self.environment = {"PATH": f"{programs}:{os.environ['PATH']}"}

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env={**os.environ, **self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def says(self, script: str, **environment: str) -> str:
        """What a script that succeeds prints."""
        ran = self.run(script, **environment)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def command(self, script: str) -> list[str]:
        """For ``Served``, which adds a host and a port to the script's last command."""
        return ["bash", "-c", f'cd "{self.folder}"\n{script.rstrip()} "$@"', "bash"]


def longer(folder: Path, context: int) -> Path:
    """The model in the box with a longer context, as documents ask for."""
    folder.mkdir()
    for file in demo.CHAT.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((demo.CHAT / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder
