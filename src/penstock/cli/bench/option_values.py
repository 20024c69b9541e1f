"""Parsers and checks of option values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.core.errors import invalid


def pair(name: str, text: str, mark: str) -> tuple[str, str]:
    """Split KEY=VALUE at the first ``mark``. Raises ``PenstockError`` (``invalid``) without one."""
    key, separator, value = text.partition(mark)
    if not separator:
        raise invalid(name, f"{text!r} must contain {mark!r}")
    return key, value


def json_object(name: str, text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ``PenstockError`` (``invalid``) for other texts."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise invalid(name, f"must be a JSON object: {error}") from error


def number(name: str, text: str, bounds: msgspec.Meta) -> float:
    """Parse a number. Raises ``PenstockError`` (``invalid``) for a number out of bounds."""
    try:
        result: float = msgspec.convert(text, Annotated[float, bounds], strict=False)
    except msgspec.ValidationError as error:
        raise invalid(name, f"{text} is wrong: {error}") from error
    return result


def check_writable(name: str, path: Path) -> None:
    """Create the folder of a file. Raises ``PenstockError`` (``invalid``) if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(path.parent, os.W_OK)
    except OSError:
        writable = False
    if path.is_dir() or not writable:
        raise invalid(name, f"{path} cannot be written: set a file in a writable folder")
