"""Triton's interpreter in place of a GPU: to be imported before ``penstock.ops.cuda``.

It has NumPy multiply matrices, which sums in an order that depends on the shapes. Here products are summed as matrix
instructions do: some inputs at a time in ascending order into the accumulator, of which each sum is exact, so that rows
have the same bits in any tile exactly where kernels are to be thanked for it. Numbers must have no more than 24 bits in
a product (float16, or float32 numbers that float16 holds).
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter


def step(columns: int) -> int:
    """Inputs of a matrix instruction, whose tile has so many columns."""
    return 16


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = (_values(operand) for operand in (a, b))
    if d.data.dtype == np.int32:
        assert left.shape[1] <= 1024  # sums of products of 8 bits are exact in float32
        exact = np.matmul(left.astype(np.float32), right.astype(np.float32)).astype(np.int32)
        return interpreter.TensorHandle(exact + d.data, d.dtype.scalar)
    left, right, total = left.astype(np.float64), right.astype(np.float64), d.data
    size = step(right.shape[1])
    for at in range(0, left.shape[1], size):
        total = (left[:, at : at + size] @ right[at : at + size] + total).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _values(operand: Any) -> Any:
    assert operand.dtype.scalar != tl.bfloat16, "the interpreter multiplies the bits of bfloat16 as integers"
    if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
        return interpreter._convert_float(operand.data, operand.dtype, tl.float16, None).view(np.float16)
    return operand.data


def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    """The interpreter forgets to carry into the exponent where it rounds to 8 bits."""
    if dst_type.scalar != tl.float8e4nv or src.dtype.scalar != tl.float32:
        return _create_fp_to_fp(self, src, dst_type, rounding_mode)
    data = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return interpreter.TensorHandle(data, dst_type.scalar)


_create_fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp
interpreter.InterpreterBuilder.create_dot = create_dot
interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp

# The interpreter patches Triton's language anew for each call of a device function, which takes most of its time. Once
# while a kernel runs is enough.
_patch_lang = interpreter._patch_lang
_patched: set[str] = set()


class _Scope:
    """What a patch has changed; undone by ``restore``."""

    def __init__(self, modules: set[str], scope: Any) -> None:
        self._modules = modules
        self._scope = scope

    def restore(self) -> None:
        if self._modules:
            _patched.difference_update(self._modules)
            self._scope.restore()


def patch_lang(function: Any) -> _Scope:
    modules = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core} - _patched
    _patched.update(modules)
    return _Scope(modules, _patch_lang(function) if modules else None)


interpreter._patch_lang = patch_lang
