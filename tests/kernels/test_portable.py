"""Portable kernels, compiled for other processors and run in an emulator; without emulator, compiled for this
machine."""

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
"""Compilers and emulators of other processors (Debian packages in tests/apt.txt)."""
AVAILABLE = [(compiler, [run]) for compiler, run in EMULATED if shutil.which(compiler) and shutil.which(run)]


@pytest.mark.parametrize("compiler, emulator", AVAILABLE or [("g++", [])])
def test_portable_kernels_match_plain_loops(compiler: str, emulator: list[str]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout

    def compile_cached(source: Path) -> str:
        """Compile a source, unless its preprocessed text is unchanged."""
        command = [compiler, *FLAGS, str(source)]
        preprocessed = subprocess.run([*command, "-E"], check=True, capture_output=True).stdout
        target = CACHE / f"{source.stem}-{sha256(f'{version}{command}'.encode() + preprocessed).hexdigest()[:20]}.o"
        if not target.exists():
            part = target.with_suffix(f".{os.getpid()}")
            done = subprocess.run([*command, "-c", "-o", str(part)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            part.rename(target)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_cached, SOURCES))
    for stale in set(CACHE.glob("*.o")) - set(map(Path, objects)):
        stale.unlink()
    with TemporaryDirectory() as folder:
        program = str(Path(folder, "check"))
        subprocess.run([compiler, "-static", *objects, "-o", program], check=True)
        result = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
