"""Limits of stored objects: ``--storage-quota`` and ``--storage-limit``."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.core.errors import invalid

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class StorageLimits(NamedTuple):
    """Maximum size and numbers of stored objects; None: no limit."""

    bytes: int | None = None
    """Total size of files, responses and conversations in bytes."""
    files: int | None = None
    responses: int | None = None
    conversations: int | None = None
    batches: int | None = None
    """Number of unfinished batches."""


def storage_limits(text: str, field: str) -> StorageLimits:
    """Parse limits such as ``bytes=10G,files=1000``. Raises ``PenstockError`` (``invalid``) for invalid ones."""
    limits: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = entry.partition("=")
        found = re.fullmatch(r"(\d{1,15})([KMGT]?)", number)
        if name not in StorageLimits._fields or not found:
            message = f"{entry!r} is not a limit such as bytes=10G (10 × 2³⁰) or files=1000: write NAME=NUMBER with the"
            raise invalid(
                field, f"{message} name {' or '.join(StorageLimits._fields)}, and K, M, G or T after the number"
            )
        limits[name] = int(found[1]) * UNITS[found[2]]
    return StorageLimits(**limits)
