"""Fetch the libraries of the web page with npm, as pinned in package-lock.json.

python scripts/web_libraries.py

The build backend calls ``fetch_libraries``. Without npm, or if npm fails (no network), the page works without them: it
shows plain text. Files that match the lock file are not fetched again, so that a source distribution contains them and
is built without npm.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path("src/penstock/serve/web/libraries")
"""Folder with package.json and package-lock.json; the libraries are put into its subfolder ``files``."""
STAMP = "fetched.sha256"
"""File of the subfolder with the hash of both files, written last."""
TIMEOUT = 180
"""Maximum time of npm in seconds."""
COMMAND = (
    *("npm", "ci", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--loglevel=error"),
    *("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=30000"),
)


def fetch_libraries(folder: Path = FOLDER) -> str:
    """Fetch the libraries if they are missing or outdated. Returns the line for the build output."""
    if not (folder / "package-lock.json").exists():
        return "web page: no libraries are declared; it will show plain text"
    files, wanted = folder / "files", _digest(folder)
    stamp = files / STAMP
    if stamp.exists() and stamp.read_text().strip() == wanted:
        return "web page: its libraries are present"
    shutil.rmtree(files, ignore_errors=True)  # outdated files must not be packaged
    with tempfile.TemporaryDirectory() as temporary:
        if problem := _install(folder, Path(temporary)):
            return (
                f"web page: {problem}; it will show answers as plain text, without Markdown and charts. "
                "Install Node.js with npm and build again."
            )
        packages = json.loads((folder / "package.json").read_text())["files"]
        for name, wanted_files in packages.items():
            _copy(Path(temporary, "node_modules", name), files / name, wanted_files)
    stamp.write_text(wanted + "\n")
    return f"web page: fetched {', '.join(packages)}"


def _digest(folder: Path) -> str:
    content = b"".join((folder / name).read_bytes() for name in ("package.json", "package-lock.json"))
    return hashlib.sha256(content).hexdigest()


def _install(folder: Path, temporary: Path) -> str:
    """Install the packages into a temporary folder. Returns an error message; empty after success."""
    if shutil.which("npm") is None:
        return "npm was not found"
    for name in ("package.json", "package-lock.json"):
        shutil.copy(folder / name, temporary)
    environment = os.environ | {"npm_config_update_notifier": "false"}
    try:
        done = subprocess.run(
            COMMAND, cwd=temporary, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"npm failed ({type(error).__name__})"
    if not done.returncode:
        return ""
    lines = [line.removeprefix("npm error ") for line in done.stderr.splitlines() if line.strip()]
    return f"npm failed ({lines[0] if lines else f'exit status {done.returncode}'})"


def _copy(package: Path, target: Path, names: list[str]) -> None:
    """Copy files of a package, and its licences."""
    for path in [*(package / name for name in names), *package.glob("LICENSE*")]:
        copy = target / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


if __name__ == "__main__":
    print(fetch_libraries())
    sys.exit(not (FOLDER / "files" / STAMP).exists())
