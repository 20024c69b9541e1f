"""Capabilities of the terminal and the encodings of standard streams."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def print_json(value: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, indent=1))


def open_closed_streams() -> None:
    """Open the null device for standard streams that are closed, so that no socket or file gets their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)
        setattr(sys, name, os.fdopen(number, mode, closefd=False))


def has_escapes() -> bool:
    """True if standard output is a terminal that supports escape sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def can_print(text: str) -> bool:
    """True if standard output's encoding has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def replace_unprintable() -> None:
    """Escape characters in output (and replace them in input) that a non-UTF-8 encoding lacks, instead of raising an
    error."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure and (stream.encoding or "").lower().replace("-", "") != "utf8":
            reconfigure(errors=errors)
