"""How a process ended, for logs and errors."""

from __future__ import annotations

import signal


def exit_reason(status: int) -> str:
    """Describe a process's return code, which is minus the signal's number where a signal has killed it."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
