"""The portable kernels compiled for other processors, under emulation; for this machine where none is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from repository import ROOT, SUPPORT

CACHE = ROOT / "build" / "portable"
SOURCES = [
    SUPPORT / "portable" / "check.cc",
    *(ROOT / "csrc" / f"{n}.cc" for n in ("kernels", "products", "attention")),
]
FLAGS = [
    "-std=c++20",
    "-O1",
    "-ffp-contract=off",
    "-Wno-psabi",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-DPENSTOCK_ISA=portable",
]


EMULATED = [("aarch64-linux-gnu-g++", "qemu-aarch64")]
"""Compiler and emulator of other processors (Debian's packages are in tests/apt.txt)."""
AVAILABLE = [(compiler, [run]) for compiler, run in EMULATED if shutil.which(compiler) and shutil.which(run)]


@pytest.mark.parametrize("compiler, emulator", AVAILABLE or [("g++", [])])
def test_portable_kernels_compute_what_plain_loops_do(compiler: str, emulator: list[str]) -> None:
    """A source that has not changed, nor any that it includes, is not compiled again."""
    CACHE.mkdir(parents=True, exist_ok=True)
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout

    def compiled(source: Path) -> str:
        command = [compiler, *FLAGS, str(source)]
        whole = subprocess.run([*command, "-E"], check=True, capture_output=True).stdout
        target = CACHE / f"{source.stem}-{sha256(f'{version}{command}'.encode() + whole).hexdigest()[:20]}.o"
        if not target.exists():
            part = target.with_suffix(f".{os.getpid()}")
            done = subprocess.run([*command, "-c", "-o", str(part)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            part.rename(target)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, SOURCES))
    for stale in set(CACHE.glob("*.o")) - set(map(Path, objects)):
        stale.unlink()
    with TemporaryDirectory() as folder:
        program = str(Path(folder, "check"))
        subprocess.run([compiler, "-static", *objects, "-o", program], check=True)
        ran = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
