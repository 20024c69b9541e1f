"""Every kernel of the CUDA backend compiles for all supported GPUs (``compile_kernels.py``), without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import pytest
import repository
from repository import SUPPORT

if not find_spec("triton"):  # no import: other test files import triton with TRITON_INTERPRET
    pytest.skip("triton is not installed", allow_module_level=True)

SCRIPT = SUPPORT / "compile_kernels.py"
CACHE = repository.BUILD / "triton"
"""Folder of Triton's cache, kept so that unchanged kernels are not compiled again."""
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Maximum shared memory of a program, bytes, by target (NVIDIA's tuning guides)."""
TENSOR_MEMORY = 512
"""Columns of tensor memory of a multiprocessor. A program that needs more columns is compiled to a trap instruction."""
FP8 = "fp8"
MULTIPLY = ("product", "product_int4", "product_fp8_blocks", "attention", "shrink", "expand")
MULTIPLY += ("latent_attention", "linear_by_head", "index_scores")
"""Names of the kernels that must have matrix instructions."""


def compile_kernels(*options: str) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, env=env, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    return document["kernels"], document["skipped"]


def check_kernels(kernels: list[dict[str, Any]], skipped: dict[str, list[str]]) -> None:
    assert kernels
    variants: dict[tuple[str, int], set[str]] = defaultdict(set)
    for kernel in kernels:
        assert not kernel["error"], kernel
        assert not kernel["local"], f"registers are spilled: {kernel}"
        assert kernel["shared"] <= SHARED[kernel["target"]], kernel
        assert kernel["tensor_memory"] <= TENSOR_MEMORY, kernel
        assert bool(kernel["mma"]) == (kernel["kernel"] in MULTIPLY), kernel
        for product in kernel["products"]:
            if kernel["mma"]:
                variants[product, kernel["target"]].add(" ".join(kernel["mma"]))
    for product, kinds in variants.items():
        assert len(kinds) == 1, f"{product}: the bits of a row may depend on the number of tokens: {kinds}"
    assert set(skipped) <= {"80"}, f"only fp8 on target 80 may be unsupported: {skipped}"
    assert all(FP8 in label for labels in skipped.values() for label in labels)


@pytest.mark.slow
def test_kernels_compile_without_spills() -> None:
    """Kernels of all ops, and products with all tiles: no spilled registers, shared memory within the limits, and the
    same kind of matrix instruction in the tiles for different numbers of tokens."""
    check_kernels(*compile_kernels("--cache", str(CACHE)))


@pytest.mark.thorough
def test_all_kernel_variants_compile_without_spills() -> None:
    check_kernels(*compile_kernels("--whole"))
