"""The compiled CPU kernels: selection of the instruction set, and warnings if the kernels are outdated."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from penstock.core import Code, PenstockError
from penstock.version import __version__

from . import _kernels

logger = logging.getLogger(__name__)

VARIABLE = "PENSTOCK_ISA"
"""Environment variable with the name of the instruction set to use; default: the fastest."""
SOURCES = Path(__file__).parents[3]
"""Root of the checkout with the kernels' sources. An installed wheel has no sources."""


def set_up() -> None:
    """Select the instruction set, and log a warning if the kernels are outdated.

    Raises ``PenstockError`` (``unsupported``) if ``PENSTOCK_ISA`` names an instruction set that cannot run here.
    """
    if problem := outdated_warning():
        logger.warning("%s", problem)
    if name := os.environ.get(VARIABLE):
        try:
            _kernels.use(name)
        except ValueError as error:
            raise PenstockError(Code.UNSUPPORTED, f"{VARIABLE}={name}: {error}", VARIABLE) from error


def outdated_warning() -> str | None:
    """Return a warning if the kernels were built from other sources or another version, or without this machine's
    fastest instruction set; None if they are up to date."""
    built, sources = getattr(_kernels, "SOURCES", "unknown"), hash_of_sources(SOURCES)
    if sources and sources != built:
        return "The CPU kernels were not built from the sources in csrc/: run `make` or `pip install -e .` again."
    version = getattr(_kernels, "VERSION", "")
    if version and version != __version__:
        return f"The CPU kernels have version {version}, but penstock has version {__version__}: reinstall penstock."
    fastest = _kernels.available()[-1]
    if fastest != (possible := getattr(_kernels, "MACHINE", [fastest])[-1]) and VARIABLE not in os.environ:
        return (
            f"The CPU kernels were built without {possible}, which this machine supports. Using {fastest}, which is "
            "slower: reinstall penstock with PENSTOCK_SETS=native in the environment."
        )
    return None


def hash_of_sources(folder: Path) -> str | None:
    """Hash of the kernels' sources, computed like in CMakeLists.txt; None if the folder has no such sources."""
    if not (folder / "csrc" / "kernels.h").exists():
        return None
    files = [folder / "CMakeLists.txt", *(file for file in (folder / "csrc").iterdir() if file.suffix in (".cc", ".h"))]
    lines = [
        f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n"
        for name in sorted(file.relative_to(folder).as_posix() for file in files)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
