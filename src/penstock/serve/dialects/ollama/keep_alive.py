"""The field ``keep_alive``: the time for which a model stays loaded after a request."""

from __future__ import annotations

import re

from penstock.core.errors import invalid

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds by unit of Go's durations."""
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
PART = re.compile(rf"({NUMBER})({'|'.join(UNITS)})")
DURATION = re.compile(rf"([+-]?)((?:{PART.pattern})+|{NUMBER})")
MAX_LENGTH = 40
"""Maximum length of a duration in characters."""
MAX_SECONDS = 1e8
"""Longer times mean that the model stays loaded (about three years)."""


def seconds_of(keep_alive: str | float) -> float | None:
    """Convert a duration (``5m``, ``1h30m``), or a number of seconds, to seconds; None: the model stays loaded.

    Raises ``PenstockError`` (``invalid``) for other strings.
    """
    if isinstance(keep_alive, str):
        match = DURATION.fullmatch(keep_alive.strip()) if len(keep_alive) <= MAX_LENGTH else None
        if not match:
            given = repr(keep_alive[:MAX_LENGTH])
            message = f"{given} is not a duration: use a number of seconds, or units, such as 5m or 1h30m"
            raise invalid("keep_alive", message)
        sign, text = match[1], match[2]
        parts = PART.findall(text)
        seconds = sum(float(number) * UNITS[unit] for number, unit in parts) if parts else float(text)
        keep_alive = -seconds if sign == "-" else seconds
    return None if keep_alive < 0 or keep_alive > MAX_SECONDS else keep_alive
