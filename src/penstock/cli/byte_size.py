"""Parsing of sizes on the command line."""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {f"{unit[0]}iB".upper(): 2 ** (10 * power) for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)}


def byte_size(text: str) -> int:
    """Parse a size such as ``5GB``, ``500 MB`` or ``1GiB``; a number without unit is bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    size = int(float(found[1]) * UNITS.get(found[2].upper(), 0)) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return size
