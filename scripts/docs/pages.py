"""The pages of docs/, as they are, and the other files of the repository that they link to."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build/docs"
HOME = {"README.md": "index.md", "README.zh-CN.md": "zh/index.md"}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
"""A link to another file: what is before its target, the target, and what is after it."""


def place(source: Path) -> str:
    """Where in the site a file of the repository is: a page of docs/ at its place there, others below repository/."""
    name = source.relative_to(ROOT).as_posix()
    if name in HOME:
        return HOME[name]
    return name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name}"


def copy_pages() -> None:
    """Write the READMEs, docs/, and every file that they link to, with links as they are in the site."""
    left = [*(ROOT / name for name in HOME), *(path for path in (ROOT / "docs").rglob("*") if path.is_file())]
    known = set(left)
    while left:
        source = left.pop()
        if source.suffix != ".md":
            write(place(source), source.read_bytes())
            continue
        text = source.read_text(encoding="utf-8")
        write(place(source), LINK.sub(lambda found, source=source: _in_site(source, found), text))  # type: ignore[misc]
        linked = {(source.parent / target).resolve() for _, target, _ in LINK.findall(text)}
        new = {path for path in linked - known if path.is_file() and path.is_relative_to(ROOT)}
        known |= new
        left += new


def write(name: str, content: str | bytes) -> None:
    """Write a file of the site's pages, unless it has this content already."""
    path, encoded = BUILT / name, content.encode() if isinstance(content, str) else content
    if not path.exists() or path.read_bytes() != encoded:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded)


def newest() -> float:
    """Time of the last change of a file of docs/ or a README, in seconds."""
    return max(path.stat().st_mtime for path in [*(ROOT / "docs").rglob("*"), *(ROOT / name for name in HOME)])


def _in_site(source: Path, found: re.Match[str]) -> str:
    """A link of ``source`` as it is in the site. One to nothing stays, and the site's generator refuses it."""
    before, target, after = found.groups()
    path = (source.parent / target).resolve()
    if not path.is_file():
        return found[0]
    return f"{before}{os.path.relpath(place(path), Path(place(source)).parent)}{after}"
