"""Versions of the site in mike's layout, which the version selector of Zensical's theme supports: a folder per version,
``latest``, and ``versions.json``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

LATEST = "latest"
REDIRECT = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Penstock</title><meta http-equiv="refresh" content="0; url=latest/">
<link rel="canonical" href="latest/"></head><body><a href="latest/">Penstock</a></body></html>
"""


def add_version(site: Path, folder: Path, version: str) -> None:
    """Add a version, or replace it. ``latest`` becomes the newest version.

    Args:
        site: folder of the built site.
        folder: folder of all versions; created if missing.
        version: version such as 1.2; raises ``SystemExit`` if it is malformed.
    """
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise SystemExit(f"{version!r} is not a version such as 1.2")
    folder.mkdir(parents=True, exist_ok=True)
    _replace(site, folder / version)
    found = (path.name for path in folder.iterdir() if re.fullmatch(r"\d+(\.\d+)+", path.name))
    versions = sorted(found, key=lambda name: [int(number) for number in name.split(".")], reverse=True)
    if versions[0] == version:
        _replace(site, folder / LATEST)
    described = [
        {"version": name, "title": name, "aliases": [LATEST] if name == versions[0] else []} for name in versions
    ]
    (folder / "versions.json").write_text(json.dumps(described, indent=2) + "\n")
    (folder / "index.html").write_text(REDIRECT)


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
