"""Several residual streams: hyper-connections (DeepSeek-V4), and AltUp (Gemma 3n)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _kernels
from .dtypes import DTYPE_CODES
from .graph import empty


def hyper_weights(logits: Tensor, base: Tensor, scale: Tensor, streams: int, iterations: int, eps: float) -> Tensor:
    """See ``reference.hyper_weights``."""
    assert logits.is_contiguous() and logits.dtype is base.dtype is scale.dtype is torch.float32
    out = empty(logits.shape, torch.float32)
    pointers = logits.data_ptr(), base.data_ptr(), scale.data_ptr(), out.data_ptr()
    _kernels.hyper_weights(*pointers, logits.shape[0], logits.shape[1], streams, iterations, eps)
    return out


def collapse_streams(x: Tensor, weights: Tensor, streams: int) -> Tensor:
    """See ``reference.collapse_streams``."""
    rows, size = x.shape[0], x.shape[1] // streams
    assert x.is_contiguous() and weights.stride(1) == 1
    out = empty((rows, size), x.dtype)
    pointers = x.data_ptr(), weights.data_ptr(), out.data_ptr()
    _kernels.collapse_streams(*pointers, rows, _row_stride(weights), streams, size, DTYPE_CODES[x.dtype])
    return out


def mix_streams(x: Tensor, residual: Tensor, weights: Tensor, streams: int) -> Tensor:
    """See ``reference.mix_streams``. ``residual`` is changed in place."""
    assert x.is_contiguous() and residual.is_contiguous() and weights.stride(1) == 1
    pointers = x.data_ptr(), residual.data_ptr(), weights.data_ptr()
    _kernels.mix_streams(*pointers, x.shape[0], _row_stride(weights), streams, x.shape[1], DTYPE_CODES[x.dtype])
    return residual


def equalize_streams(x: Tensor, streams: int, min_square: float) -> Tensor:
    """See ``reference.equalize_streams``. ``x`` is changed in place."""
    assert x.is_contiguous()
    rows, size = x.shape[0], x.shape[1] // streams
    _kernels.equalize_streams(x.data_ptr(), rows, streams, size, min_square, DTYPE_CODES[x.dtype])
    return x


def _row_stride(weights: Tensor) -> int:
    """Elements between the weights of two rows; 0 if all rows have the same."""
    return weights.stride(0) if weights.shape[0] > 1 else 0
