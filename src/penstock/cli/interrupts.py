"""Ctrl-C during imports."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once in the context, without ``KeyboardInterrupt``: an interrupted import of torch
    continues, and fails later with another error."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, handler)
