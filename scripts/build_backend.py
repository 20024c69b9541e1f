"""Build backend: scikit-build-core, plus a file ``penstock/COMMIT`` with the commit of the checkout, and the libraries
of the web page.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scikit_build_core import build as backend
from scikit_build_core.build import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from web_libraries import fetch_libraries

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, list[str] | str] | None
COMMIT = Path("src/penstock/COMMIT")


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    _fetch_libraries()
    with _commit_written():
        return backend.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    _fetch_libraries()
    with _commit_written():
        return backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _fetch_libraries()
    return backend.build_editable(wheel_directory, config_settings, metadata_directory)


def _fetch_libraries() -> None:
    print(fetch_libraries(), file=sys.stderr)


@contextmanager
def _commit_written() -> Iterator[None]:
    """Context with the file ``COMMIT`` in a checkout. A source distribution already has it."""
    commit = _head() if Path(".git").exists() else ""
    if commit:
        COMMIT.write_text(commit + "\n")
    try:
        yield
    finally:
        if commit:
            COMMIT.unlink(missing_ok=True)


def _head() -> str:
    """Commit of this checkout, with the suffix ``-dirty`` if files are modified; empty without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
