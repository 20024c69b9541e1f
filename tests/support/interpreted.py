"""Triton's interpreter instead of a GPU; import this module before ``penstock.ops.cuda``.

The interpreter multiplies matrices with NumPy, where the order of summation depends on the shapes. This module replaces
it: as in matrix instructions, a few inputs at a time are summed exactly and added to the accumulator, in ascending
order. So rows have the same bits in every tile if, and only if, the kernels ensure it. A product must have at most 24
bits (float16 inputs, or float32 inputs that float16 can represent).
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
    """Number of inputs that a matrix instruction sums, for a tile with ``columns`` columns."""
    return 16


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = (_values(operand) for operand in (a, b))
    if d.data.dtype == np.int32:
        assert left.shape[1] <= 1024  # sums of up to 1,024 int8 products are exact in float32
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
    """Round to float8_e4m3 with PyTorch: the interpreter does not carry into the exponent."""
    if dst_type.scalar != tl.float8e4nv or src.dtype.scalar != tl.float32:
        return _create_fp_to_fp(self, src, dst_type, rounding_mode)
    data = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return interpreter.TensorHandle(data, dst_type.scalar)


_create_fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp
interpreter.InterpreterBuilder.create_dot = create_dot
interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp

# The interpreter patches Triton's language for each call of a device function. That takes most of the time, and one
# patch per kernel is enough.
_patch_lang = interpreter._patch_lang
_patched: set[str] = set()


class _Scope:
    """Attributes changed by a patch; ``restore`` resets them."""

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
