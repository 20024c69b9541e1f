"""Images of a chat: from files and URLs to URLs that a request may have."""

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
"""A path as terminals paste it: quoted, or with backslashes before spaces. A bare name is a word."""
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"))


def image_url(given: str) -> str:
    """An image's URL: itself, or the contents of a file as a ``data:`` URL.

    Raises ``PenstockError`` (``invalid``) where there is no image.
    """
    if given.startswith(REMOTE):
        return given
    path = _as_path(given)
    kind, _ = mimetypes.guess_type(path.name)
    if kind is None or not kind.startswith("image/"):
        raise invalid("image", f"{path} is not called as an image: its name must end as {', '.join(sorted(SUFFIXES))}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise invalid("image", f"{path} cannot be read: {error.strerror}") from error
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def pasted_images(line: str) -> tuple[str, list[str]]:
    """A line without the paths of images that exist, and these paths."""
    found: list[str] = []

    def take(match: re.Match[str]) -> str:
        path = match[1] or match[2] or re.sub(r"\\(.)", r"\1", match[3] or "")
        if Path(path).suffix.lower() in SUFFIXES and _as_path(path).is_file():
            found.append(path)
            return ""
        return match[0]

    text = PATH.sub(take, line)
    return (" ".join(text.split()), found) if found else (line, [])


def _as_path(given: str) -> Path:
    if given.startswith("file:"):
        given = unquote(re.sub(r"^file:(//)?", "", given))
    return Path(given).expanduser()
