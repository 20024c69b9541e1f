"""Copying of docs/, and of the files of the repository that its pages link to, into the site."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build/docs"
HOME = {"README.md": "index.md", "README.zh-CN.md": "zh/index.md"}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
"""Markdown link to a file: text before its target, the target, and text after it."""


def site_path(source: Path) -> str:
    """Path in the site of a file of the repository: pages of docs/ keep their path, other files are in repository/. For
    a folder: the page that lists its files."""
    name = source.relative_to(ROOT).as_posix()
    if name in HOME:
        return HOME[name]
    if source.is_dir():
        name += "/files.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return re.sub(r"/\.", "/", f"repository/{name}")  # the site must have no hidden files


def copy_pages() -> None:
    """Write the READMEs, docs/, and all files and folders that they link to, with links adjusted to the site."""
    remaining = [*(ROOT / name for name in HOME), *_files(ROOT / "docs")]
    known = set(remaining)
    while remaining:
        source = remaining.pop()
        linked: set[Path] = set()
        if source.is_dir():
            files = _files(source)
            linked.update(files)
            names = [path.relative_to(source).as_posix() for path in files]
            write(site_path(source), f"# {source.name}\n\n" + "".join(f"- [{name}]({name})\n" for name in names))
        elif source.suffix == ".md":
            text = source.read_text(encoding="utf-8")
            linked.update((source.parent / target).resolve() for _, target, _ in LINK.findall(text))
            write(site_path(source), LINK.sub(partial(_in_site, source), text))
        else:
            write(site_path(source), source.read_bytes())
        new = {path for path in linked - known if path.exists() and path.is_relative_to(ROOT)}
        known |= new
        remaining += new


def write(name: str, content: str | bytes) -> None:
    """Write a page of the site, unless it is unchanged."""
    write_file(BUILT / name, content)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, unless it is unchanged."""
    encoded = content.encode() if isinstance(content, str) else content
    if not path.exists() or path.read_bytes() != encoded:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded)


def newest() -> float:
    """Time of the last change of a file in docs/ or a README, in seconds."""
    return max(path.stat().st_mtime for path in [*(ROOT / "docs").rglob("*"), *(ROOT / name for name in HOME)])


def _files(folder: Path) -> list[Path]:
    """Files in a folder, recursively, without hidden files and ``__pycache__``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if not re.search(r"(^|/)(\.|__pycache__/)", path.relative_to(folder).as_posix())]


def _in_site(source: Path, found: re.Match[str]) -> str:
    """Adjust a link of ``source`` to the site. A broken link is unchanged, and the site generator reports it."""
    before, target, after = found.groups()
    path = (source.parent / target).resolve()
    if not path.exists() or not path.is_relative_to(ROOT):
        return found[0]
    return f"{before}{os.path.relpath(site_path(path), Path(site_path(source)).parent)}{after}"
