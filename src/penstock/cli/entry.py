"""Entry point of ``penstock``: Ctrl-C ends it without a traceback while modules are imported."""

from .interrupts import ending_at_ctrl_c, repeat_ignored_interrupts


def main() -> int:
    """Run a command; returns the exit status."""
    repeat_ignored_interrupts()
    with ending_at_ctrl_c():
        from .main import main as run

    return run()
