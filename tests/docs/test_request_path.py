"""Files through which a streaming chat passes: their number is limited, and docs/architecture/request.md lists them."""

from __future__ import annotations

import pytest
from request_path import PAGE, Called, page_with, streamed_chat

pytestmark = pytest.mark.slow

MAX_FILES = 46
"""Maximum number of files per process."""


@pytest.fixture(scope="module")
def processes() -> dict[str, Called]:
    return streamed_chat()


def test_streamed_chat_uses_at_most_max_files(processes: dict[str, Called]) -> None:
    counts = {name: len(files) for name, files in processes.items()}
    assert max(counts.values()) <= MAX_FILES, (counts, processes)


def test_architecture_lists_files_of_streamed_chat(processes: dict[str, Called]) -> None:
    """Update the list with ``python tests/support/request_path.py``."""
    assert PAGE.read_text(encoding="utf-8") == page_with(processes)
