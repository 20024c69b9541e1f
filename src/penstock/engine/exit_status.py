"""Descriptions of exit statuses, for logs and errors."""

from __future__ import annotations

import signal

LINK_LOST = 86
"""Exit status of a rank that has lost its connection to a rank of another node. The other node's log has the cause."""


def exit_reason(status: int) -> str:
    """Describe a process's return code; negative values are signal numbers."""
    if status == LINK_LOST:
        return "it has lost its connection to a rank of another node"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
