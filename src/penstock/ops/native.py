"""Which compiled kernels are here: whether they fit sources and machine, and which instruction set computes."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path

from penstock.core import Code, PenstockError

from . import _kernels

logger = logging.getLogger(__name__)

VARIABLE = "PENSTOCK_ISA"
"""In the environment: the instruction set to compute with. Without it the fastest one does."""
SOURCES = Path(__file__).parents[3]
"""Where the kernels' sources lie in a checkout; of an installed wheel they do not."""


def set_up() -> None:
    """Chooses the instruction set, and warns of kernels that do not fit.

    Raises ``PenstockError`` (``unsupported``) where the set that is asked for cannot run here.
    """
    if problem := misfit():
        logger.warning("%s", problem)
    if name := os.environ.get(VARIABLE):
        try:
            _kernels.use(name)
        except ValueError as error:
            raise PenstockError(Code.UNSUPPORTED, f"{VARIABLE}={name}: {error}", VARIABLE) from error


def misfit() -> str | None:
    """What is wrong with the compiled kernels, and what to run; none where they fit."""
    built, sources = getattr(_kernels, "SOURCES", "unknown"), hash_of_sources(SOURCES)
    if sources and sources != built:
        return (
            "The CPU kernels were built from other sources than those in csrc/: run `make` or `pip install -e .` again."
        )
    own, version = sys.modules["penstock"].__version__, getattr(_kernels, "VERSION", "")
    if version and version != own:
        return f"The CPU kernels are of version {version}, and penstock is {own}: install it again."
    fastest = _kernels.available()[-1]
    if fastest != (possible := getattr(_kernels, "MACHINE", [fastest])[-1]) and VARIABLE not in os.environ:
        return (
            f"The CPU kernels were built without {possible}, which this machine runs, so {fastest} computes, slower: "
            "install penstock again with PENSTOCK_SETS=native in the environment."
        )
    return None


def hash_of_sources(folder: Path) -> str | None:
    """As CMakeLists.txt computes it; none where a folder does not hold the sources."""
    if not (folder / "csrc" / "kernels.h").exists():
        return None
    files = [folder / "CMakeLists.txt", *(file for file in (folder / "csrc").iterdir() if file.suffix in (".cc", ".h"))]
    lines = [
        f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n"
        for name in sorted(file.relative_to(folder).as_posix() for file in files)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
