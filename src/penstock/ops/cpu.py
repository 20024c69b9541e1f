"""The CPU kernels (``csrc/``), batch-invariant: an output's sum is taken in one order whatever shares the batch.

Kernels take addresses and sizes. This module checks what they trust, and allocates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from . import _kernels
from .batch import Batch, KVSpec

NAME = "cpu"
BATCH_INVARIANT = True
TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class Matrix:
    """``[out, in]`` in panels of 64 outputs."""

    panels: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int


@dataclass(frozen=True)
class LayerCache:
    """A layer's keys and values: ``[blocks, kv_heads * 2 * head_dim * block_size]`` in the kernels' own order."""

    data: Tensor
    spec: KVSpec


def fingerprint() -> str:
    """What decides the bits of a result besides the model: instruction set and format of the kernels."""
    return f"cpu-{_kernels.current()}-1"


def set_threads(count: int) -> None:
    """Threads that share a call's work; 0 takes all cores this process may use. Results do not depend on it."""
    _kernels.set_threads(count or usable_cores())


def usable_cores() -> int:
    """Cores of this process, within the limits of its container."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as limit:
            quota, period = limit.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def check(dtype: torch.dtype) -> int:
    """The kernels' number of a dtype; raises ``PenstockError`` (``unsupported``) for those they do not know."""
    if dtype not in TYPES:
        raise PenstockError(Code.UNSUPPORTED, f"{dtype} on a CPU; use bfloat16 or float32", "dtype")
    return TYPES[dtype]


def pack(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    kind, (outputs, inputs) = check(weight.dtype), weight.shape
    weight = weight.contiguous()
    panels = torch.zeros(_kernels.packed_size(outputs, inputs), dtype=weight.dtype)
    _kernels.pack(weight.data_ptr(), panels.data_ptr(), inputs, outputs, kind)
    return Matrix(panels, None if bias is None else bias.float(), outputs, inputs)


def linear(x: Tensor, matrix: Matrix, wide: bool = False) -> Tensor:
    x = x.contiguous()
    rows = x.shape[0]
    dtype = torch.float32 if wide else x.dtype
    out = torch.empty((rows, matrix.outputs), dtype=dtype)
    _kernels.linear(
        x.data_ptr(),
        matrix.panels.data_ptr(),
        0 if matrix.bias is None else matrix.bias.data_ptr(),
        out.data_ptr(),
        rows,
        matrix.inputs,
        matrix.outputs,
        TYPES[x.dtype],
        TYPES[dtype],
    )
    return out


def likeliest(x: Tensor, matrix: Matrix) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape[0], dtype=torch.int64)
    bias = 0 if matrix.bias is None else matrix.bias.data_ptr()
    sizes = x.shape[0], matrix.inputs, matrix.outputs
    _kernels.likeliest(x.data_ptr(), matrix.panels.data_ptr(), bias, out.data_ptr(), *sizes, TYPES[x.dtype])
    return out


def embedding(token_ids: Tensor, matrix: Matrix) -> Tensor:
    rows, kind = token_ids.shape[0], TYPES[matrix.panels.dtype]
    out = torch.empty((rows, matrix.inputs), dtype=matrix.panels.dtype)
    _kernels.gather(token_ids.data_ptr(), matrix.panels.data_ptr(), out.data_ptr(), rows, matrix.inputs, kind)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    groups = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype)
    _kernels.norm(
        x.data_ptr(),
        0,
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        groups,
        size,
        x.stride(0),
        eps,
        TYPES[x.dtype],
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual`` is written, too."""
    out = torch.empty_like(x)
    rows, size = x.shape
    _kernels.norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        1,
        size,
        size,
        eps,
        TYPES[x.dtype],
    )
    return out, residual


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype)
    _kernels.rope(
        x.data_ptr(),
        out.data_ptr(),
        positions.data_ptr(),
        table.data_ptr(),
        tokens,
        heads,
        dim,
        x.stride(0),
        TYPES[x.dtype],
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype)
    _kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, TYPES[gate_up.dtype])
    return out


def new_cache(spec: KVSpec, blocks: int, device: torch.device) -> list[LayerCache]:
    """Raises ``PenstockError`` where the kernels cannot hold such blocks or heads."""
    check(spec.dtype)
    if spec.block_size % 16 or spec.block_size > _kernels.MAX_BLOCK:
        raise invalid("block_size", f"must be a multiple of 16, at most {_kernels.MAX_BLOCK}", _kernels.MAX_BLOCK)
    if spec.head_dim % 16 or spec.head_dim > _kernels.MAX_HEAD:
        raise PenstockError(Code.UNSUPPORTED, f"heads of {spec.head_dim}: multiples of 16 to {_kernels.MAX_HEAD} are")
    values = 2 * spec.kv_heads * spec.head_dim * spec.block_size
    # NumPy's zeros are the system's own, which take memory when they are first written: gigabytes cost no start-up.
    integer = f"i{spec.dtype.itemsize}"
    layers = [torch.from_numpy(np.zeros((blocks, values), integer)) for _ in range(spec.layers)]
    return [LayerCache(layer.view(spec.dtype), spec) for layer in layers]


def store(cache: LayerCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    spec = cache.spec
    _kernels.store(
        k.data_ptr(),
        v.data_ptr(),
        cache.data.data_ptr(),
        slots.data_ptr(),
        k.shape[0],
        spec.kv_heads,
        spec.head_dim,
        spec.block_size,
        k.stride(0),
        v.stride(0),
        TYPES[k.dtype],
    )


def attention(q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int = 0) -> Tensor:
    spec, heads = cache.spec, q.shape[1]
    out = torch.empty_like(q)
    _kernels.attention(
        q.data_ptr(),
        out.data_ptr(),
        cache.data.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.query_starts.data_ptr(),
        batch.lengths.data_ptr(),
        batch.lengths.shape[0],
        heads,
        spec.kv_heads,
        spec.head_dim,
        spec.block_size,
        batch.block_tables.shape[1],
        window,
        scale,
        TYPES[q.dtype],
    )
    return out


def copy_blocks(source: list[LayerCache], target: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
    if not pairs:
        return
    origins, goals = (list(blocks) for blocks in zip(*pairs, strict=True))
    for layer, other in zip(source, target, strict=True):
        other.data[goals] = layer.data[origins]
