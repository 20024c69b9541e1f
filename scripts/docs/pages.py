"""The pages of docs/, as they are, and the other files of the repository that they link to."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build/docs"
HOME = {"README.md": "index.md", "README.zh-CN.md": "zh/index.md"}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
"""A link to another file: what is before its target, the target, and what is after it."""


def place(source: Path) -> str:
    """Where in the site a file of the repository is: a page of docs/ at its place there, others below repository/. Of a
    folder it is the page that lists its files."""
    name = source.relative_to(ROOT).as_posix()
    if name in HOME:
        return HOME[name]
    if source.is_dir():
        name += "/files.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return re.sub(r"/\.", "/", f"repository/{name}")  # files with a dot before their name are not part of a site


def copy_pages() -> None:
    """Write the READMEs, docs/, and all files and folders that they link to, with links as they are in the site."""
    left = [*(ROOT / name for name in HOME), *_files(ROOT / "docs")]
    known = set(left)
    while left:
        source = left.pop()
        linked: set[Path] = set()
        if source.is_dir():
            files = _files(source)
            linked.update(files)
            names = [path.relative_to(source).as_posix() for path in files]
            write(place(source), f"# {source.name}\n\n" + "".join(f"- [{name}]({name})\n" for name in names))
        elif source.suffix == ".md":
            text = source.read_text(encoding="utf-8")
            linked.update((source.parent / target).resolve() for _, target, _ in LINK.findall(text))
            write(place(source), LINK.sub(partial(_in_site, source), text))
        else:
            write(place(source), source.read_bytes())
        new = {path for path in linked - known if path.exists() and path.is_relative_to(ROOT)}
        known |= new
        left += new


def write(name: str, content: str | bytes) -> None:
    """Write a file of the site's pages, unless it has this content already."""
    write_file(BUILT / name, content)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, unless it has this content already."""
    encoded = content.encode() if isinstance(content, str) else content
    if not path.exists() or path.read_bytes() != encoded:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded)


def newest() -> float:
    """Time of the last change of a file of docs/ or a README, in seconds."""
    return max(path.stat().st_mtime for path in [*(ROOT / "docs").rglob("*"), *(ROOT / name for name in HOME)])


def _files(folder: Path) -> list[Path]:
    """Those of a folder and the folders in it, without hidden ones and what Python has compiled."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if not re.search(r"(^|/)(\.|__pycache__/)", path.relative_to(folder).as_posix())]


def _in_site(source: Path, found: re.Match[str]) -> str:
    """A link of ``source`` as it is in the site. One to nothing stays, and the site's generator refuses it."""
    before, target, after = found.groups()
    path = (source.parent / target).resolve()
    if not path.exists() or not path.is_relative_to(ROOT):
        return found[0]
    return f"{before}{os.path.relpath(place(path), Path(place(source)).parent)}{after}"
