"""Ctrl-C at moments at which Python ignores it or goes on in a broken state."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

REPEAT_AFTER = 0.01
"""Seconds after which an ignored Ctrl-C is repeated."""


@contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once in the context, without ``KeyboardInterrupt``: an interrupted import of torch
    continues, and fails later with another error."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def repeat_ignored_interrupts() -> None:
    """Repeat Ctrl-C that reaches a destructor or a callback, in which Python ignores it and prints a traceback."""
    report = sys.unraisablehook

    def repeat(error: "sys.UnraisableHookArgs") -> None:
        if error.exc_type is not KeyboardInterrupt:
            report(error)
            return
        from threading import Timer, get_ident

        with suppress(RuntimeError):  # the process is already ending
            Timer(REPEAT_AFTER, signal.pthread_kill, (get_ident(), signal.SIGINT)).start()

    sys.unraisablehook = repeat
