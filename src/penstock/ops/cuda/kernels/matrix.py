"""Kernels of products with matrices, and of embeddings."""

import triton
import triton.language as tl


@triton.jit
def gather_rows(ids, weight, out, first, rows, size, out_stride, BLOCK: tl.constexpr):
    """Row ``ids[program]`` of an unquantized matrix; nothing is written for ids of none of its rows."""
    token = tl.program_id(0)
    row = tl.load(ids + token) - first
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row >= 0) & (row < rows) & (columns < size)
    values = tl.load(weight + row.to(tl.int64) * size + columns, mask=inside)
    tl.store(out + token.to(tl.int64) * out_stride + columns, values, mask=inside)
