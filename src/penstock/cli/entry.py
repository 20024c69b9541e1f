"""Entry point of ``penstock``: Ctrl-C ends it without a traceback while modules are imported."""

import signal


def main() -> int:
    """Run a command; returns the exit status."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import main as run

    signal.signal(signal.SIGINT, handler)
    return run()
