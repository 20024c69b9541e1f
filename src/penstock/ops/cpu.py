"""The CPU kernels (``csrc/``), batch-invariant: an output's sum is taken in one order whatever shares the batch.

Kernels take addresses and sizes. This module checks what they trust, and allocates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from . import _kernels, native, pages
from .batch import KVSpec, Queries, Step
from .formats import PLAIN, Format
from .low_rank import LowRank
from .tape import LARGEST_STEP, Recorded, contiguous, empty

native.set_up()

NAME = "cpu"
BATCH_INVARIANT = True
LAYOUT = "cpu-1"
"""Of packed matrices, which is the same for every instruction set."""
TYPES = {torch.float32: 0, torch.bfloat16: 1}
NUMBERS = {(0, 0): 0, (8, 8): 1, (4, 8): 2, (8, 0): 3, (4, 0): 4}
"""The kernels' number of a format, by bits of weights and of activations."""


SKETCHED = 8192
"""Outputs from which on a sketch of a matrix pays."""
REST = 50
"""Calls without it after one for which it did not."""


@dataclass(frozen=True)
class Matrix:
    """``[out, in]`` in panels of 64 outputs."""

    native: Any
    held: dict[str, Tensor]
    """What ``native`` points to: values, scales, bias."""
    outputs: int
    inputs: int
    dtype: torch.dtype
    format: Format

    @cached_property
    def sketch(self) -> Sketch | None:
        """Made when it is first asked for; none where it would not pay, and of what holds more than numbers."""
        if self.format != PLAIN or "bias" in self.held or self.outputs < SKETCHED:
            return None
        rounded = _matrix(None, self.inputs, self.outputs, self.dtype, None, Format(bits=8, activations=8))
        panels = -(-self.outputs // _kernels.PANEL)
        bounds = torch.empty(2, panels)
        native = _kernels.Sketch(self.native, rounded.native, bounds[0].data_ptr(), bounds[1].data_ptr())
        _kernels.sketch(native)
        return Sketch(native, rounded, bounds) if bounds.isfinite().all() else None


@dataclass
class Sketch:
    """A matrix in 8 bits, with bounds of how far off they are: enough to see which outputs may be the largest."""

    native: Any
    rounded: Matrix
    bounds: Tensor
    """``[2, panels]`` float32."""
    resting: int = 0
    """Calls that go without it, since it did not pay in the one before them."""

    def likeliest(self, x: Tensor, out: Tensor, allowed: int = 0) -> bool:
        """Fill ``out`` as ``likeliest`` does, or say that it takes the whole matrix; bits of what is allowed lie at an
        address, 0 is all."""
        if self.resting:
            self.resting -= 1
            return False
        _held, given = _given(x, self.rounded)
        found = _kernels.likeliest_by_sketch(x.data_ptr(), *given, self.native, allowed, out.data_ptr(), x.shape[0])
        self.resting = 0 if found else REST
        return found


@dataclass(frozen=True)
class Rounded:
    """Rows rounded to 8 bits: ``[tokens, in]`` is ``values * scales``."""

    values: Tensor
    """``[tokens, in]`` int8, padded with zeros to a multiple of 8."""
    scales: Tensor
    """``[tokens]`` float32."""
    sums: Tensor
    """``[tokens, groups]`` int32: of the values."""


@dataclass(frozen=True)
class Packed:
    """What an adapter adds to a layer."""

    down: Matrix
    """Of all parts, their ranks one after the other."""
    ups: tuple[Matrix, ...]
    parts: tuple[tuple[int, float], ...]
    """First output and scale of each."""


@dataclass(frozen=True)
class Adapters:
    """What adapters add to a layer, by slot."""

    native: Any
    held: dict[int, Packed]
    """What ``native`` points to."""


@dataclass(frozen=True)
class LayerCache:
    """A layer's keys and values: ``[blocks, bytes]`` uint8 in the kernels' own order."""

    data: Tensor
    spec: KVSpec


def fingerprint() -> str:
    """What decides the bits of a result besides the model: instruction set and format of the kernels."""
    return f"cpu-{_kernels.current()}-5"


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


@dataclass(frozen=True)
class Limits:
    """What nothing here can go beyond, all threads together."""

    read: float
    """Bytes a second from memory."""
    bfloat16: float
    """Products and sums of bfloat16 a second."""
    int8: float
    """Of 8-bit integers."""


def limits(size: int = 2**29) -> Limits:
    """Measured now, in about half a second; with ``size`` bytes of memory."""
    memory = pages.zeros(size, huge=True)
    memory.fill_(1)
    fastest = min(_kernels.time_read(memory.data_ptr(), size) for _ in range(8))
    rates = [max(_kernels.dot_rate(integers, 2_000_000) for _ in range(4)) for integers in (False, True)]
    return Limits(size / fastest, *rates)


def check(dtype: torch.dtype) -> int:
    """The kernels' number of a dtype; raises ``PenstockError`` (``unsupported``) for those they do not know."""
    if dtype not in TYPES:
        raise PenstockError(Code.UNSUPPORTED, f"{dtype} on a CPU; use bfloat16 or float32", "dtype")
    return TYPES[dtype]


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = PLAIN) -> Matrix:
    if any(part.shape[0] % _kernels.PANEL for part in parts[:-1]):
        parts = [torch.cat(list(parts))]
    dtype, inputs = parts[0].dtype, parts[0].shape[1]
    matrix = _matrix(None, inputs, sum(part.shape[0] for part in parts), dtype, bias, format)
    first = 0
    for part in parts:
        part = part.contiguous()  # held until it is packed
        _kernels.pack(part.data_ptr(), matrix.native, first, part.shape[0])
        first += part.shape[0]
    return matrix


def packed(matrix: Matrix) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in matrix.held.items() if name != "bias"}


def restore(
    found: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, bias: Tensor | None, format: Format
) -> Matrix:
    return _matrix(found, inputs, outputs, dtype, bias, format)


def _matrix(
    found: Mapping[str, Tensor] | None,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    format: Format,
) -> Matrix:
    """Of what was packed before, or still empty."""
    kind, number = check(dtype), NUMBERS[format.bits, format.activations]
    if format.bits and not format.activations and dtype is not torch.bfloat16:
        raise PenstockError(Code.UNSUPPORTED, "integers by float32; use bfloat16", "quantization")
    group = format.group or inputs
    sizes = inputs, outputs, group, number, kind
    panels = -(-outputs // _kernels.PANEL)
    values = panels * _kernels.Matrix(0, 0, 0, *sizes).panel_bytes
    scales = panels * -(-inputs // group) * _kernels.PANEL if format.bits else 0
    if found is None:
        held = {"values": pages.zeros(values, huge=True)} | ({"scales": torch.zeros(scales)} if scales else {})
    else:
        held = dict(found)
    expected = {"values": (values, torch.uint8)} | ({"scales": (scales, torch.float32)} if scales else {})
    if {name: (tensor.numel(), tensor.dtype) for name, tensor in held.items()} != expected:
        raise PenstockError(Code.INTERNAL, "kept weights are of another size")  # the kernels would not notice
    if bias is not None:
        held["bias"] = bias.float()
    at, by, added = (held[name].data_ptr() if name in held else 0 for name in ("values", "scales", "bias"))
    return Matrix(_kernels.Matrix(at, by, added, *sizes), held, outputs, inputs, dtype, format)


def quantize(x: Tensor, group: int = 0) -> Rounded:
    """Each row divided by its largest magnitude times 127, and rounded; sums are those of groups, 0 is all."""
    x = contiguous(x)
    rows, inputs = x.shape
    padded, group = -(-inputs // 8) * 8, group or inputs
    groups = -(-inputs // group)
    out = Rounded(empty((rows, padded), torch.int8), empty((rows,), torch.float32), empty((rows, groups), torch.int32))
    _kernels.quantize(
        x.data_ptr(),
        out.values.data_ptr(),
        out.scales.data_ptr(),
        out.sums.data_ptr(),
        rows,
        inputs,
        padded,
        group,
        TYPES[x.dtype],
    )
    return out


def _given(x: Tensor, matrix: Matrix) -> tuple[tuple[Any, ...], tuple[int, int, int]]:
    """What a product takes in, as addresses, and what must be held for so long."""
    if not matrix.format.activations:
        x = contiguous(x)
        return (x,), (x.data_ptr(), 0, 0)
    rounded = quantize(x, matrix.format.group)
    held = rounded.values, rounded.scales, rounded.sums
    return held, (rounded.values.data_ptr(), rounded.scales.data_ptr(), rounded.sums.data_ptr())


def linear(x: Tensor, matrix: Matrix, wide: bool = False) -> Tensor:
    dtype = torch.float32 if wide else x.dtype
    out = empty((x.shape[0], matrix.outputs), dtype)
    _held, given = _given(x, matrix)
    _kernels.linear(*given, matrix.native, out.data_ptr(), x.shape[0], TYPES[dtype])
    return out


def gated(x: Tensor, matrix: Matrix) -> Tensor:
    size = matrix.outputs // 2
    if size % _kernels.PANEL:
        return silu_mul(linear(x, matrix))
    out = empty((x.shape[0], size), x.dtype)
    _held, given = _given(x, matrix)
    _kernels.gated(*given, matrix.native, out.data_ptr(), x.shape[0], TYPES[x.dtype])
    return out


def new_adapters(slots: int) -> Adapters:
    return Adapters(_kernels.Adapters(slots), {})


def pack_low_rank(parts: Sequence[LowRank]) -> Packed:
    down = pack([torch.cat([part.down for part in parts])])
    return Packed(down, tuple(pack([part.up]) for part in parts), tuple((part.first, part.scale) for part in parts))


def put_low_rank(adapters: Adapters, slot: int, packed: Packed | None) -> None:
    adapters.native.clear(slot)
    adapters.held.pop(slot, None)
    if packed is not None:
        adapters.held[slot] = packed
        adapters.native.put(slot, packed.down.native)
        for up, (first, scale) in zip(packed.ups, packed.parts, strict=True):
            adapters.native.add(slot, up.native, first, scale)


def add_low_rank(out: Tensor, x: Tensor, adapters: Adapters, slots: Tensor) -> Tensor:
    """``out`` is written."""
    x = contiguous(x)
    rows, outputs = out.shape
    _kernels.add_low_rank(x.data_ptr(), out.data_ptr(), adapters.native, slots.data_ptr(), rows, outputs)
    return out


def likeliest(x: Tensor, matrix: Matrix, allowed: Tensor | None = None) -> Tensor:
    x, out = contiguous(x), empty((x.shape[0],), torch.int64)
    bits = 0
    if allowed is not None:
        if allowed.shape != (x.shape[0], -(-matrix.outputs // 32)) or allowed.dtype is not torch.int32:
            raise ValueError(f"bits of {tuple(allowed.shape)} {allowed.dtype} for {matrix.outputs} outputs")
        allowed = allowed.contiguous()
        bits = allowed.data_ptr()
    if matrix.sketch and matrix.sketch.likeliest(x, out, bits):
        return out
    _held, given = _given(x, matrix)
    _kernels.likeliest(*given, matrix.native, bits, out.data_ptr(), x.shape[0])
    return out


def embedding(token_ids: Tensor, matrix: Matrix) -> Tensor:
    rows = token_ids.shape[0]
    out = empty((rows, matrix.inputs), matrix.dtype)
    _kernels.gather(token_ids.data_ptr(), matrix.native, out.data_ptr(), rows)
    return out


def take(x: Tensor, rows: Tensor) -> Tensor:
    out = empty((rows.shape[0], *x.shape[1:]), x.dtype)
    x = contiguous(x)
    row_bytes = prod(x.shape[1:]) * x.element_size()
    _kernels.take(x.data_ptr(), rows.data_ptr(), out.data_ptr(), rows.shape[0], row_bytes)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    groups = x.shape[1] if x.dim() == 3 else 1
    out = empty(x.shape, x.dtype)
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
    out = empty(x.shape, x.dtype)
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
    out = empty((tokens, heads, dim), x.dtype)
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
    out = empty((rows, size), gate_up.dtype)
    _kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, TYPES[gate_up.dtype])
    return out


def new_cache(spec: KVSpec, blocks: int, device: torch.device) -> list[LayerCache]:
    """Raises ``PenstockError`` where the kernels cannot hold such blocks or heads."""
    check(spec.dtype)
    if spec.block_size % 16 or spec.block_size > _kernels.MAX_BLOCK:
        raise invalid("block_size", f"must be a multiple of 16, at most {_kernels.MAX_BLOCK}", _kernels.MAX_BLOCK)
    if spec.head_dim % 16 or spec.head_dim > _kernels.MAX_HEAD:
        raise PenstockError(Code.UNSUPPORTED, f"heads of {spec.head_dim}: multiples of 16 to {_kernels.MAX_HEAD} are")
    size = spec.bytes_per_layer
    return [LayerCache(pages.zeros(blocks * size).view(blocks, size), spec) for _ in range(spec.layers)]


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
        spec.rounded,
    )


def attention(q: Tensor, cache: LayerCache, queries: Queries, scale: float, window: int = 0) -> Tensor:
    spec, heads = cache.spec, q.shape[1]
    out = empty(q.shape, q.dtype)
    _kernels.attention(
        q.data_ptr(),
        out.data_ptr(),
        cache.data.data_ptr(),
        queries.block_tables.data_ptr(),
        queries.starts.data_ptr(),
        queries.lengths.data_ptr(),
        queries.lengths.shape[0],
        heads,
        spec.kv_heads,
        spec.head_dim,
        spec.block_size,
        queries.block_tables.shape[1],
        window,
        scale,
        TYPES[q.dtype],
        spec.rounded,
    )
    return out


def recorded(step: Step, tokens: int, sequences: int, blocks: int, adapted: bool = False) -> Step:
    """A step that costs one native call; a batch of more tokens than ``LARGEST_STEP`` runs call by call.

    PyTorch gets one thread from now on: its threads keep looking for work for a while, on cores that ours then lack.
    """
    torch.set_num_threads(1)
    return Recorded(step, min(tokens, LARGEST_STEP), sequences, blocks, adapted)


def copy_blocks(source: list[LayerCache], target: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
    if not pairs:
        return
    origins, goals = (list(blocks) for blocks in zip(*pairs, strict=True))
    for layer, other in zip(source, target, strict=True):
        other.data[goals] = layer.data[origins]
