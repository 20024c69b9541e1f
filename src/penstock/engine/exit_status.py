"""How a process ended, in words."""

from __future__ import annotations

import signal


def in_words(status: int) -> str:
    """Of a process's return code, which is negative where a signal has ended it."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
