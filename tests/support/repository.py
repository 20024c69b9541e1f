"""Folders of the repository that tests read or write."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
"""Folder of modules and programs that several tests use."""
TESTS = SUPPORT.parent
ROOT = TESTS.parent
BUILD = ROOT / "build"
"""Folder for build outputs, ignored by git and kept between test runs."""
