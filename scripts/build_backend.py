"""Build backend: scikit-build-core, plus a file ``penstock/COMMIT`` with the commit of the checkout."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scikit_build_core import build as backend
from scikit_build_core.build import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

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
    with _commit_written():
        return backend.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    with _commit_written():
        return backend.build_wheel(wheel_directory, config_settings, metadata_directory)


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
