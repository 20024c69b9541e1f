"""Images of a chat: conversion of files to ``data:`` URLs, and detection of pasted paths."""

from __future__ import annotations

import base64
import mimetypes
import re
from pathlib import Path
from urllib.parse import unquote

from penstock.core.errors import invalid

REMOTE = ("http://", "https://", "data:image/")
PATH = re.compile(
    r"""(?<!\S)(?:'((?:file:/|~|\.{0,2}/)[^']*)'|"((?:file:/|~|\.{0,2}/)[^"]*)"|((?:file:/|~|\.{0,2}/)(?:\\.|[^\s\\])*))"""
)
"""A path pasted into a terminal: quoted, or with backslashes before spaces. A name without ``/`` does not match."""
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"))


def image_url(given: str) -> str:
    """Convert a file to a ``data:`` URL; other URLs are returned unchanged.

    Raises ``PenstockError`` (``invalid``) if the file is not an image, or cannot be read.
    """
    if given.startswith(REMOTE):
        return given
    path = _as_path(given)
    kind, _ = mimetypes.guess_type(path.name)
    if kind is None or not kind.startswith("image/"):
        raise invalid("image", f"{path} is not an image: its name must end with one of {', '.join(sorted(SUFFIXES))}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise invalid("image", f"{path} cannot be read: {error.strerror}") from error
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def pasted_images(line: str) -> tuple[str, list[str]]:
    """Remove the paths of existing images from a line; returns the line and the paths."""
    found: list[str] = []

    def extract(match: re.Match[str]) -> str:
        path = match[1] or match[2] or re.sub(r"\\(.)", r"\1", match[3] or "")
        if Path(path).suffix.lower() in SUFFIXES and _as_path(path).is_file():
            found.append(path)
            return ""
        return match[0]

    text = PATH.sub(extract, line)
    return (text.strip(), found) if found else (line, [])


def _as_path(given: str) -> Path:
    if given.startswith("file:"):
        given = unquote(re.sub(r"^file:(//)?", "", given))
    return Path(given).expanduser()
