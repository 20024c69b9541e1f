"""Kernels on token ids."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def resolve_tokens_kernel(token_ids, sampled, count, BLOCK: tl.constexpr):
    """Replace token ids ``-1 - i`` by ``sampled[i]``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + at, mask=at < count, other=0)
    in_flight = (at < count) & (ids < 0)
    tl.store(token_ids + at, tl.load(sampled + (-1 - ids), mask=in_flight, other=0), mask=in_flight)
