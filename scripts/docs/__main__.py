"""The site of the documents: ``python scripts/docs build`` writes build/site, ``serve`` shows it and follows changes.
``build --version 1.2`` also puts it among the versions in build/versions, which are a site of their own.
``drawings`` writes those of docs/architecture.md, which are kept in docs/architecture.

Zensical makes the site. It has no hooks, so that what is not a file of docs/ is written before it runs, to build/docs.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time

from drawings import write_drawings
from options_page import options_page
from pages import BUILT, ROOT, copy_pages, newest, write
from python_page import python_page
from routes_page import routes_page
from theme import write_theme
from versions import add_version

ZENSICAL = [sys.executable, "-m", "zensical"]


def write_pages() -> None:
    """Write every page to build/docs; those that have not changed stay as they are."""
    copy_pages()
    write("reference/options.md", options_page())
    write("reference/routes.md", routes_page())
    write("reference/python.md", python_page())
    write_theme()


def build(version: str = "") -> int:
    """Build the site anew; returns 1 where it has a warning.

    Args:
        version: under which it is put in build/versions; empty for nowhere.
    """
    for folder in (BUILT, ROOT / "build/site"):
        shutil.rmtree(folder, ignore_errors=True)
    write_pages()
    status = subprocess.call([*ZENSICAL, "build", "--strict", "--clean"], cwd=ROOT)
    if version and status == 0:
        add_version(ROOT / "build/site", ROOT / "build/versions", version)
    return status


def serve(arguments: list[str]) -> int:
    """Serve the site, until it is interrupted, and write its pages again where a file of docs/ has changed."""
    write_pages()
    changed = newest()
    with subprocess.Popen([*ZENSICAL, "serve", *arguments], cwd=ROOT) as server:
        while server.poll() is None:
            time.sleep(0.5)
            if newest() != changed:
                changed = newest()
                copy_pages()
    return server.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("command", choices=["build", "serve", "drawings"])
    parser.add_argument("--version", default="", help="with build: put the site under this version in build/versions")
    args, others = parser.parse_known_args()
    if args.command == "drawings":
        write_drawings()
        return 0
    try:
        return build(args.version) if args.command == "build" else serve(others)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
