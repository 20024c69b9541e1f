"""The user's folders for caches and configuration."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.core.errors import invalid


def user_folder(variable: str, default: str) -> Path:
    """Folder named by an environment variable, or ``default`` in the user's home folder.

    Raises ``PenstockError`` (``invalid``) if the variable is unset and the user has no home folder.
    """
    if given := os.environ.get(variable):
        return Path(given)
    try:
        return Path.home() / default
    except RuntimeError as error:
        message = f"user {os.getuid()} has no home folder: set HOME or {variable} to a writable folder"
        raise invalid(variable, message) from error


def cache_home() -> Path:
    """Folder of the user's caches."""
    return user_folder("XDG_CACHE_HOME", ".cache")
