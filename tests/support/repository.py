"""Folders of the repository that tests read or write."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
"""Modules and programs for several tests."""
TESTS = SUPPORT.parent
ROOT = TESTS.parent
BUILD = ROOT / "build"
"""Ignored by git; kept between runs."""
