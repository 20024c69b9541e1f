"""The compiled kernels of this installation: choice of the instruction set, and warnings where they are out of date."""

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
"""Environment variable that names the instruction set to compute with; the default is the fastest."""
SOURCES = Path(__file__).parents[3]
"""Root of the checkout with the kernels' sources; in an installed wheel there are none."""


def set_up() -> None:
    """Choose the instruction set, and log a warning where the kernels are out of date.

    Raises ``PenstockError`` (``unsupported``) where ``PENSTOCK_ISA`` names one that cannot run here.
    """
    if problem := outdated_warning():
        logger.warning("%s", problem)
    if name := os.environ.get(VARIABLE):
        try:
            _kernels.use(name)
        except ValueError as error:
            raise PenstockError(Code.UNSUPPORTED, f"{VARIABLE}={name}: {error}", VARIABLE) from error


def outdated_warning() -> str | None:
    """A warning, with what to run, for kernels of other sources or another version, or without this machine's fastest
    instruction set. None where the kernels are up to date."""
    built, sources = getattr(_kernels, "SOURCES", "unknown"), hash_of_sources(SOURCES)
    if sources and sources != built:
        return (
            "The CPU kernels were built from other sources than those in csrc/: run `make` or `pip install -e .` again."
        )
    version = getattr(_kernels, "VERSION", "")
    if version and version != __version__:
        return f"The CPU kernels are of version {version}, and penstock is {__version__}: install it again."
    fastest = _kernels.available()[-1]
    if fastest != (possible := getattr(_kernels, "MACHINE", [fastest])[-1]) and VARIABLE not in os.environ:
        return (
            f"The CPU kernels were built without {possible}, which this machine runs, so {fastest} computes, slower: "
            "install penstock again with PENSTOCK_SETS=native in the environment."
        )
    return None


def hash_of_sources(folder: Path) -> str | None:
    """Hash of the kernels' sources, as CMakeLists.txt computes it; None where the folder does not hold them."""
    if not (folder / "csrc" / "kernels.h").exists():
        return None
    files = [folder / "CMakeLists.txt", *(file for file in (folder / "csrc").iterdir() if file.suffix in (".cc", ".h"))]
    lines = [
        f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n"
        for name in sorted(file.relative_to(folder).as_posix() for file in files)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
