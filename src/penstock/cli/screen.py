"""What the terminal of standard output can show."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def has_escapes(stream: TextIO | None = None) -> bool:
    """Whether a stream (standard output) is a terminal that moves its cursor by escape sequences."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def can_print(text: str, stream: TextIO | None = None) -> bool:
    """Whether a stream's (standard output's) encoding has all characters of a text."""
    try:
        text.encode((stream or sys.stdout).encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def replace_unprintable() -> None:
    """Where an encoding lacks characters, have outputs escape them and the input replace them: Python would stop."""
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure and (stream.encoding or "").lower().replace("-", "") != "utf8":
            reconfigure(errors=errors)
