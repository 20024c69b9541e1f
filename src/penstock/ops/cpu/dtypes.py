"""Dtypes of the CPU kernels, and their numbers in the kernels."""

from __future__ import annotations

import torch

from penstock.core import Code, PenstockError

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Number of each dtype in the kernels."""


def dtype_code(dtype: torch.dtype) -> int:
    """Return the kernels' number of a dtype. Raises ``PenstockError`` (``unsupported``) for a dtype without kernels."""
    if dtype not in DTYPE_CODES:
        message = f"{dtype} is not supported on CPUs; use bfloat16 or float32"
        raise PenstockError(Code.UNSUPPORTED, message, "dtype")
    return DTYPE_CODES[dtype]
