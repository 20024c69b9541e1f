"""The portable kernels compiled for other processors, under emulation; for this machine where none is installed."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    ROOT / "tests" / "portable" / "check.cc",
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
def test_portable_kernels_compute_what_plain_loops_do(compiler: str, emulator: list[str], tmp_path: Path) -> None:
    def compiled(source: Path) -> str:
        target = str(tmp_path / f"{source.stem}.o")
        done = subprocess.run([compiler, *FLAGS, "-c", str(source), "-o", target], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, SOURCES))
    program = str(tmp_path / "check")
    subprocess.run([compiler, "-static", *objects, "-o", program], check=True)
    ran = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
