"""CPU kernels of every instruction set: equal to the reference ops on random shapes, with the same bits in any
batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.checkpoint.kv_spec import transfer_layouts
from penstock.core import PenstockError
from penstock.core.quantization import SCHEMES
from penstock.ops import (
    AttentionMetadata,
    AttentionOptions,
    Batch,
    CaptureOptions,
    Format,
    KVSpec,
    LoRAWeights,
    QuantizedWeight,
    backend,
    reference,
)
from penstock.ops.activations import ACTIVATIONS, GATES
from penstock.ops.hadamard import hadamard

cpu = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
kernels: Any = cpu._kernels

DTYPES = (torch.float32, torch.bfloat16)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
FORMATS = sorted(
    {scheme.layers for scheme in SCHEMES.values() if not scheme.layers.floating} - {Format()}
    | {Format(4, 128), Format(4, 64, 8, rotation=64)}
    | {Format(4, size, 8, integer_scales=True) for size in (8, 32)},
    key=str,
)
KV_QUANTIZATIONS = ("", "int8")
"""Tested quantizations of the KV cache."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=kernels.available(), autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.current()
    kernels.use(request.param)
    cpu.set_threads(2)
    yield
    kernels.use(before)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swiglu(x: Tensor, matrix: Any) -> Tensor:
    product: Tensor = cpu.linear_activation_and_mul(x, matrix, "silu")
    return product


def assert_close(got: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=TOLERANCE[got.dtype] * scale, rtol=TOLERANCE[got.dtype])


sizes = st.integers(1, 200)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)
EXAMPLES = int(os.environ.get("PENSTOCK_OPS_EXAMPLES", "25"))
"""Number of random examples for each kernel and instruction set."""
few = settings(max_examples=EXAMPLES, deadline=None)


@few
@given(
    seed=seeds,
    rows=sizes,
    inputs=st.integers(1, 700),
    outputs=sizes,
    dtype=dtypes,
    bias=st.booleans(),
    out_float32=st.booleans(),
)
def test_linear_argmax_and_embedding_match_reference(
    seed: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype, bias: bool, out_float32: bool
) -> None:
    x, weight = randn(seed, rows, inputs, dtype=dtype), randn(seed + 1, outputs, inputs, dtype=dtype)
    added = randn(seed + 2, outputs, dtype=dtype) if bias else None
    got = cpu.linear(x, cpu.pack([weight], added), out_float32)
    expected = reference.linear(
        x.double(), reference.pack([weight.double()], None if added is None else added.double())
    )
    assert_close(got, expected.to(torch.float32 if out_float32 else dtype), inputs**0.5)
    packed = cpu.pack([weight], added)
    scores = cpu.linear(x, packed, out_float32=True)
    assert_largest(cpu.argmax(x, packed), scores)
    allowed = random_bitmask(seed, rows, outputs)
    assert_largest(cpu.argmax(x, packed, allowed), reference.apply_bitmask(scores.clone(), allowed))
    ids = torch.tensor([outputs - 1, 0])
    assert torch.equal(cpu.embedding(ids, cpu.pack([weight])), weight[ids])


def add_special_values(seed: int, weight: Tensor, x: Tensor) -> None:
    """Add ties, outliers, very large and very small values, rows of zeros, NaN and infinity."""
    draw, (outputs, inputs) = Random(seed), weight.shape
    for _ in range(draw.randrange(4)):
        weight[draw.randrange(outputs)] = weight[draw.randrange(outputs)] * draw.choice([1.0, 1.0, 30.0, 1e-35])
    for _ in range(draw.randrange(3)):
        x[draw.randrange(len(x)), draw.randrange(inputs)] *= draw.choice([0.0, 100.0])
    if draw.random() < 0.3:
        x[draw.randrange(len(x))] = 0
    if draw.random() < 0.2:
        x[draw.randrange(len(x)), draw.randrange(inputs)] = draw.choice([float("nan"), float("inf")])
    if draw.random() < 0.1:
        weight[draw.randrange(outputs), draw.randrange(inputs)] = draw.choice([float("nan"), float("inf")])
    if draw.random() < 0.2:
        weight *= draw.choice([1e-20, 1e15])
    if draw.random() < 0.2:
        x[: draw.randrange(len(x) + 1)] *= draw.choice([1e-24, 1e20])


@pytest.mark.slow_after(1)
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds, rows=sizes, inputs=st.integers(1, 130), more=st.integers(0, 200), dtype=dtypes)
def test_argmax_with_sketch_equals_full_argmax(
    seed: int, rows: int, inputs: int, more: int, dtype: torch.dtype
) -> None:
    outputs = cpu.sketch.MIN_SKETCH_OUTPUTS + more
    x, weight = randn(seed, rows, inputs, dtype=dtype), randn(seed + 1, outputs, inputs, dtype=dtype)
    add_special_values(seed, weight, x)
    sketched, full = cpu.pack([weight]), cpu.pack([weight], torch.zeros(outputs, dtype=dtype))
    assert bool(cpu.sketch.sketch_of(sketched)) == bool(weight.isfinite().all()) and not cpu.sketch.sketch_of(full)
    assert torch.equal(cpu.argmax(x, sketched)[0], cpu.argmax(x, full)[0])
    allowed = random_bitmask(seed, rows, outputs)
    allowed[seed % rows] *= seed % 3  # a row may allow no token: a grammar may exclude all tokens of a rank
    if allowed[seed % rows].any():
        assert torch.equal(cpu.argmax(x, sketched, allowed)[0], cpu.argmax(x, full, allowed)[0])
    else:
        found, largest = cpu.argmax(x, sketched, allowed)
        assert largest[seed % rows] == -torch.inf
        others = torch.arange(rows) != seed % rows
        assert torch.equal(found[others], cpu.argmax(x, full, allowed)[0][others])
    if (scores := cpu.linear(x, full, out_float32=True)).isfinite().all():
        assert_largest(cpu.argmax(x, sketched), scores)
        if allowed.any(1).all():
            assert_largest(cpu.argmax(x, sketched, allowed), reference.apply_bitmask(scores.clone(), allowed))


def assert_largest(found: tuple[Tensor, Tensor], logits: Tensor) -> None:
    index, largest = found
    assert torch.equal(index, logits.argmax(-1))
    assert torch.equal(largest, logits.amax(-1))


def random_bitmask(seed: int, rows: int, outputs: int) -> Tensor:
    """Random bitmask of allowed outputs, ``[rows, outputs / 32]`` int32, with at least one bit set in each row."""
    draw = np.random.default_rng(seed)
    bits = draw.random((rows, -(-outputs // 32) * 32)) < draw.choice([0.0, 0.001, 0.1, 0.9], (rows, 1))
    bits[np.arange(rows), draw.integers(outputs, size=rows)] = True
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def test_sketch_falls_back_for_zeros_and_backs_off() -> None:
    weight = randn(0, cpu.sketch.MIN_SKETCH_OUTPUTS, 64, dtype=torch.bfloat16)
    matrix, out = cpu.pack([weight]), (torch.empty(8, dtype=torch.int64), torch.empty(8))
    sketch = cpu.sketch.sketch_of(matrix)
    assert sketch.argmax(randn(1, 8, 64, dtype=torch.bfloat16), *out)
    zeros = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert not sketch.argmax(zeros, *out)
    for _ in range(cpu.sketch.BACKOFF_CALLS):  # after a failure, the sketch is not used for this number of calls
        assert not sketch.argmax(randn(1, 8, 64, dtype=torch.bfloat16), *out)
    assert sketch.argmax(randn(1, 8, 64, dtype=torch.bfloat16), *out)


@pytest.mark.slow_after(5)
@settings(max_examples=EXAMPLES * 3 // 2, deadline=None)
@given(seed=seeds, rows=sizes, inputs=st.integers(1, 400), outputs=sizes, bias=st.booleans(), out_float32=st.booleans())
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_quantized_linear_matches_reference_in_any_batch(
    format: Format, seed: int, rows: int, inputs: int, outputs: int, bias: bool, out_float32: bool
) -> None:
    dtype = torch.bfloat16 if not format.activation_bits or seed % 2 else torch.float32
    x, weight = randn(seed, rows, inputs, dtype=dtype), randn(seed + 1, outputs, inputs, dtype=dtype)
    x[0] *= seed % 3  # may be a row of zeros
    added = randn(seed + 2, outputs, dtype=dtype) if bias else None
    ours, theirs = cpu.pack([weight], added, format), reference.pack([weight], added, format)
    ids = torch.arange(outputs)
    assert torch.equal(cpu.embedding(ids, ours), reference.embedding(ids, theirs))
    got = cpu.linear(x, ours, out_float32)
    assert_close(got, reference.linear(x, theirs, out_float32), inputs**0.5)
    assert_largest(cpu.argmax(x, ours), cpu.linear(x, ours, out_float32=True))
    for border in (outputs // 2, outputs // 128 * 64):
        parts = cpu.pack([weight[:border], weight[border:]], added, format)
        assert torch.equal(got, cpu.linear(x, parts, out_float32))
    cut = rows // 2
    assert torch.equal(got, torch.cat([cpu.linear(x[:cut], ours, out_float32), cpu.linear(x[cut:], ours, out_float32)]))


@pytest.mark.parametrize("block", [1, 2, 8, 64])
def test_hadamard_equals_matrix_product(block: int) -> None:
    x, matrix = torch.randint(-50, 50, (3, 192)).float(), torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    assert torch.equal(hadamard(x, block), (x.unflatten(1, (-1, block)) @ matrix).flatten(1))


def test_rotation_reduces_quantization_error_of_outliers() -> None:
    x, weight = randn(0, 40, 192), randn(1, 100, 192)
    x[:, 5] *= 100
    weight[:, 5] /= 100
    exact = x.double() @ weight.double().T

    def error(format: Format) -> float:
        return float((cpu.linear(x, cpu.pack([weight], None, format)) - exact).square().mean())

    assert error(Format(8, activation_bits=8, rotation=64)) < 0.1 * error(Format(8, activation_bits=8))


def test_searched_scales_have_less_error_than_absmax_scales() -> None:
    weight = randn(0, 64, 256, dtype=torch.float32)
    rows = torch.arange(64)
    rounded = cpu.embedding(rows, cpu.pack([weight], None, Format(4, 64, 8)))
    largest = weight.view(64, 4, 64).abs().amax(-1, keepdim=True) / 7
    plain = ((weight.view(64, 4, 64) / largest).round() * largest).view(64, 256)
    assert (rounded - weight).square().sum() < 0.85 * (plain - weight).square().sum()


def draw_quantized(rng: Random, outputs: int, inputs: int, format: Format, ordered: bool) -> QuantizedWeight:
    """A quantized weight of a checkpoint, with integers in the whole range of the format.

    Args:
        ordered: add an order of the inputs (``desc_act`` of GPTQ).
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    groups, most = -(-inputs // (format.group_size or inputs)), 1 << (format.bits - 1)
    ordered = ordered and not format.rotation
    values = torch.randint(-most, most, (outputs, inputs), generator=generator).to(torch.int8)
    scales, offsets = (torch.randn(outputs, groups, generator=generator) for _ in range(2))
    if rng.random() < 0.5:
        scales, offsets = (each.half().float() * rng.choice((1.0, 1e-5)) for each in (scales, offsets))
    order = torch.randperm(inputs, generator=generator) if ordered else None
    return QuantizedWeight(values, scales / most, format, offsets if format.asymmetric else None, order)


GROUP_SIZES = [8, 16, 32, 40, 64, 128]
integers = st.builds(
    Format,
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([0, *GROUP_SIZES]),
    activation_bits=st.sampled_from([0, 8]),
    asymmetric=st.booleans(),
    rotation=st.sampled_from([0, 0, 64]),
)
with_activation_groups = st.builds(
    Format,
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from(GROUP_SIZES),
    activation_bits=st.just(8),
    asymmetric=st.booleans(),
    activation_groups=st.just(True),
)
quantized = integers | with_activation_groups | st.just(Format(4, 32, floating=True))
"""Formats of quantized checkpoints."""


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(
    seed=seeds,
    format=quantized,
    rows=sizes,
    inputs=st.integers(1, 400),
    outputs=sizes,
    ordered=st.booleans(),
    bias=st.booleans(),
)
def test_checkpoint_weights_match_reference_in_any_batch(
    seed: int, format: Format, rows: int, inputs: int, outputs: int, ordered: bool, bias: bool
) -> None:
    rng = Random(seed)
    dtype = torch.bfloat16 if not format.activation_bits or seed % 2 else torch.float32
    assert cpu.supports(format, dtype)
    weight = draw_quantized(rng, outputs, inputs, format, ordered and not format.activation_groups)
    x = randn(seed, rows, inputs, dtype=dtype)
    x[0] *= seed % 3  # may be a row of zeros
    added = randn(seed + 2, outputs, dtype=dtype) if bias else None
    ours, theirs = (ops.pack_quantized([weight], dtype, added) for ops in (cpu, reference))
    ids = torch.arange(outputs)
    assert torch.equal(cpu.embedding(ids, ours), reference.embedding(ids, theirs))
    got = cpu.linear(x, ours, out_float32=True)
    assert_close(got, reference.linear(x, theirs, out_float32=True), inputs**0.5)
    assert torch.equal(cpu.linear(x, ours), got.to(dtype))
    assert_largest(cpu.argmax(x, ours), got)
    border, one = rng.randrange(outputs + 1), rng.randrange(rows)
    stacked = cpu.pack_quantized([weight.rows(0, border), weight.rows(border, outputs)], dtype, added)
    cached = cpu.from_packed(cpu.packed_tensors(ours), inputs, outputs, dtype, added, format)
    for matrix in (ours, stacked, cached):
        for part in (slice(0, rows // 2), slice(rows // 2, rows), slice(one, one + 1)):
            assert torch.equal(cpu.linear(x[part], matrix, out_float32=True), got[part])
    both = cpu.pack_quantized([weight, weight], dtype)
    assert torch.equal(swiglu(x, both), cpu.activation_and_mul(cpu.linear(x, both), "silu"))


def test_packed_tensors_of_wrong_size_are_refused() -> None:
    format = Format(4, 32, asymmetric=True)
    weight = draw_quantized(Random(0), 70, 100, format, ordered=True)
    tensors = cpu.packed_tensors(cpu.pack_quantized([weight], torch.bfloat16))
    assert sorted(tensors) == ["offsets", "order", "scales", "values"]
    wrong = {name: tensors | {name: tensor[:-1]} for name, tensor in tensors.items()}
    wrong["not a permutation"] = tensors | {"order": tensors["order"] * 0}
    wrong |= {f"no {lost}": {name: tensor for name, tensor in tensors.items() if name != lost} for lost in tensors}
    del wrong["no order"]
    for case in wrong.values():
        with pytest.raises(PenstockError, match="packed weights"):
            cpu.from_packed(case, 100, 70, torch.bfloat16, None, format)


@pytest.mark.slow_after(1)
@settings(max_examples=5, deadline=None)
@given(seed=seeds, rows=st.integers(7, 70), inputs=st.integers(770, 1300), outputs=st.integers(1024, 1200))
@pytest.mark.parametrize("format", [Format(), *FORMATS], ids=str)
def test_large_matrices_match_reference_with_any_threads(
    format: Format, seed: int, rows: int, inputs: int, outputs: int
) -> None:
    """The matrices are computed in several input chunks and with several panels per task; a single thread splits the
    tasks differently."""
    x, weight = (randn(seed + i, n, inputs, dtype=torch.bfloat16) for i, n in enumerate((rows, outputs)))
    matrix, theirs = cpu.pack([weight], None, format), reference.pack([weight], None, format)
    got = cpu.linear(x, matrix)
    assert_close(got, reference.linear(x, theirs), inputs**0.5)
    both = cpu.pack([weight, weight.flip(0)], None, format)
    gated = swiglu(x, both)
    assert torch.equal(gated, cpu.activation_and_mul(cpu.linear(x, both), "silu"))
    cut = rows // 3
    cpu.set_threads(1)
    assert torch.equal(got, torch.cat([cpu.linear(x[:cut], matrix), cpu.linear(x[cut:], matrix)]))
    assert torch.equal(gated, torch.cat([swiglu(x[:cut], both), swiglu(x[cut:], both)]))
    cpu.set_threads(2)


@pytest.mark.slow_after(8)
@few
@given(seed=seeds, rows=sizes, inputs=st.integers(1, 400), size=sizes, whole=st.booleans(), dtype=dtypes)
@pytest.mark.parametrize("format", [Format(), *FORMATS], ids=str)
def test_gated_linear_matches_reference_in_any_batch(
    format: Format, seed: int, rows: int, inputs: int, size: int, whole: bool, dtype: torch.dtype
) -> None:
    dtype = torch.bfloat16 if format.bits and not format.activation_bits else dtype
    size = -(-size // 64) * 64 if whole else size
    x, weight = randn(seed, rows, inputs, dtype=dtype), randn(seed + 1, 2 * size, inputs, dtype=dtype)
    bias = randn(seed + 2, 2 * size, dtype=dtype) if seed % 2 else None
    matrix = cpu.pack([weight], bias, format)
    got = swiglu(x, matrix)
    assert torch.equal(got, cpu.activation_and_mul(cpu.linear(x, matrix), "silu"))
    assert_close(got, reference.linear_activation_and_mul(x, reference.pack([weight], bias, format), "silu"), inputs)
    cut = rows // 2
    assert torch.equal(got, torch.cat([swiglu(x[:cut], matrix), swiglu(x[cut:], matrix)]))


@few
@given(seed=seeds, rows=st.integers(1, 40), size=sizes, heads=st.integers(1, 5), dtype=dtypes)
def test_norms_match_reference(seed: int, rows: int, size: int, heads: int, dtype: torch.dtype) -> None:
    weight = randn(seed, size, dtype=dtype)
    x, residual = randn(seed + 1, rows, size, dtype=dtype), randn(seed + 2, rows, size, dtype=dtype)
    assert_close(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    expected = reference.add_rms_norm(x, residual, weight, 1e-6)
    for ours, theirs in zip(cpu.add_rms_norm(x, residual.clone(), weight, 1e-6), expected, strict=True):
        assert_close(ours, theirs)
    view = randn(seed + 3, rows, heads * size + 7, dtype=dtype)[:, 3 : 3 + heads * size].view(rows, heads, size)
    assert_close(cpu.rms_norm(view, weight, 1e-6), reference.rms_norm(view, weight, 1e-6))


@few
@given(seed=seeds, rows=st.integers(1, 40), size=sizes, dtype=dtypes)
def test_activations_match_reference(seed: int, rows: int, size: int, dtype: torch.dtype) -> None:
    both = randn(seed, rows, 2 * size, dtype=dtype) * 6
    for function in ACTIVATIONS:
        x = both[:, 1 : 1 + size]
        assert_close(cpu.activation(x, function), reference.activation(x, function))
    for function in (*ACTIVATIONS, *GATES):
        assert_close(cpu.activation_and_mul(both, function), reference.activation_and_mul(both, function))


@few
@given(seed=seeds, tokens=st.integers(1, 40), heads=st.integers(1, 5), half=st.integers(1, 70), dtype=dtypes)
def test_rope_and_silu_and_mul_match_reference(
    seed: int, tokens: int, heads: int, half: int, dtype: torch.dtype
) -> None:
    table, positions = randn(seed, 50, 2 * half), torch.randint(50, (tokens,))
    view = randn(seed, tokens, heads * 2 * half + 5, dtype=dtype)[:, : heads * 2 * half].view(tokens, heads, 2 * half)
    assert_close(cpu.rope(view, positions, table), reference.rope(view, positions, table))
    gate_up = randn(seed, tokens, 2 * half, dtype=dtype) * 10
    assert_close(cpu.activation_and_mul(gate_up, "silu"), reference.activation_and_mul(gate_up, "silu"), 10)


@few
@given(seed=seeds, rows=st.integers(1, 40), size=sizes, heads=st.integers(1, 5), dtype=dtypes)
def test_norms_with_float32_weights_match_reference(
    seed: int, rows: int, size: int, heads: int, dtype: torch.dtype
) -> None:
    """Tests RMS norms with float32 weights, and layer norms; also of strided rows of heads, and with a weight per
    head."""
    weight, bias, x, residual = (
        randn(seed + i, *shape) for i, shape in enumerate(((size,), (size,), (rows, size), (rows, size)))
    )
    x, residual = x.to(dtype), residual.to(dtype)
    assert_close(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    expected = reference.add_rms_norm(x, residual, weight, 1e-6)
    for ours, theirs in zip(cpu.add_rms_norm(x, residual.clone(), weight, 1e-6), expected, strict=True):
        assert_close(ours, theirs)
    view = randn(seed + 4, rows, heads * size + 7, dtype=dtype)[:, 3 : 3 + heads * size].view(rows, heads, size)
    assert_close(cpu.rms_norm(view, weight, 1e-6), reference.rms_norm(view, weight, 1e-6))
    assert_close(cpu.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    per_head = randn(seed + 5, heads, size)
    assert_close(cpu.layer_norm(view, per_head, None, 1e-5), reference.layer_norm(view, per_head, None, 1e-5))


@few
@given(
    seed=seeds, tokens=st.integers(1, 40), heads=st.integers(1, 5), dim=st.integers(1, 8), share=st.integers(0, 8),
    interleaved=st.booleans(), dtype=dtypes,
)  # fmt: skip
def test_interleaved_and_partial_rope_match_reference(
    seed: int, tokens: int, heads: int, dim: int, share: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Tests interleaved RoPE, partial RoPE, and RoPE without rotated dimensions."""
    dim, rotary = 16 * dim, min(2 * share * dim, 16 * dim)
    table, positions = randn(seed, 50, rotary), torch.randint(50, (tokens,))
    view = randn(seed, tokens, heads * dim + 5, dtype=dtype)[:, : heads * dim].view(tokens, heads, dim)
    assert_close(cpu.rope(view, positions, table, interleaved), reference.rope(view, positions, table, interleaved))


@few
@given(seed=seeds, rows=st.integers(1, 40), size=sizes, dtype=dtypes)
def test_fused_activations_and_scale_match_reference(seed: int, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(seed, rows, 2 * size, dtype=dtype) * 10, randn(seed + 1, 128, 2 * size, dtype=dtype)
    matrix = cpu.pack([weight])
    for function in (*ACTIVATIONS, *GATES):
        product = cpu.activation_and_mul(cpu.linear(x, matrix), function)
        assert torch.equal(cpu.linear_activation_and_mul(x, matrix, function), product)
    for factor, cap in ((0.3, 0.0), (2.0, 5.0), (1.0, 30.0)):
        assert_close(cpu.scale(x, factor, cap), reference.scale(x, factor, cap), 10)


@few
@given(seed=seeds, rows=st.integers(1, 40), size=sizes, multiplier=st.floats(-2, 3), dtype=dtypes)
def test_gaussian_topk_matches_reference(
    seed: int, rows: int, size: int, multiplier: float, dtype: torch.dtype
) -> None:
    x = randn(seed, rows, size + 3, dtype=dtype)[:, 2:-1] * 4 + 1
    got = cpu.gaussian_topk(x, multiplier)
    assert_close(got, reference.gaussian_topk(x, multiplier), 10)
    assert torch.equal(got[-1:], cpu.gaussian_topk(x[-1:], multiplier))


@few
@given(seed=seeds, rows=st.integers(1, 40), size=sizes, streams=st.integers(2, 8), dtype=dtypes)
def test_ops_on_residual_streams_match_reference(
    seed: int, rows: int, size: int, streams: int, dtype: torch.dtype
) -> None:
    """Also with one row of weights for all tokens, and a stream of zeros."""
    x, whole = randn(seed, rows, size, dtype=dtype), randn(seed + 1, rows, streams * size, dtype=dtype)
    whole[:, -size:] = 0
    for count in (rows, 1):
        weights = randn(seed + 2, count, streams * (streams + 2))
        collapsed = [ops.collapse_streams(whole, weights, streams) for ops in (cpu, reference)]
        assert_close(*collapsed, 10)
        mixed = [ops.mix_streams(x, whole.clone(), weights, streams) for ops in (cpu, reference)]
        assert_close(*mixed, 10)
        assert torch.equal(mixed[0][-1:], cpu.mix_streams(x[-1:], whole[-1:].clone(), weights[-1:], streams))
    equal = [ops.equalize_streams(whole.clone(), streams, 1e-5) for ops in (cpu, reference)]
    assert_close(*equal, 10)


def draw_batch(rng: Random, block_size: int, sequences: int) -> tuple[Batch, int, int]:
    """A batch of sequences with cached and new tokens; returns the batch, its number of tokens, and of blocks."""
    lengths = [rng.randint(1, 150) for _ in range(sequences)]
    new = [rng.choice((1, rng.randint(1, length))) for length in lengths]
    needed = [-(-length // block_size) for length in lengths]
    free = list(range(sum(needed)))
    rng.shuffle(free)
    tables = torch.zeros((sequences, max(needed)), dtype=torch.int32)
    for i, count in enumerate(needed):
        tables[i, :count] = torch.tensor([free.pop() for _ in range(count)])
    positions = [p for length, n in zip(lengths, new, strict=True) for p in range(length - n, length)]
    starts = [sum(new[:i]) for i in range(sequences + 1)]
    num_logits = [rng.choice((0, 1, 1, n)) for n in new]
    chosen = [i for i, count in enumerate(num_logits) if count]
    rows = [row for i in chosen for row in range(starts[i + 1] - num_logits[i], starts[i + 1])]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    batch = Batch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
        attention=AttentionMetadata(tensor(starts), tensor(lengths), tables),
        logits_indices=torch.tensor(rows, dtype=torch.int64),
        logits_attention=AttentionMetadata(
            tensor([0, *accumulate(num_logits[i] for i in chosen)]),
            tensor([lengths[i] for i in chosen]),
            tables[chosen],
        ),
    )
    return batch, len(positions), sum(needed)


def fill(spec: KVSpec, batch: Batch, blocks: int, rng: Random, garbage: int = 255) -> tuple[Any, Any]:
    """Caches of the kernels and of the reference with the same keys and values, and garbage bytes in unused slots."""
    device = torch.device("cpu")
    ours, theirs = (ops.new_kv_cache([spec], blocks, device)[0] for ops in (cpu, reference))
    ours.data.fill_(garbage)
    for i, length in enumerate(batch.attention.seq_lens.tolist()):
        positions = torch.arange(length)
        blocks_of = batch.attention.block_tables[i].long()[positions // spec.block_size]
        slots = blocks_of * spec.block_size + positions % spec.block_size
        k, v = (
            randn(rng.getrandbits(31), length, spec.kv_heads, spec.head_dim, dtype=getattr(torch, spec.dtype))
            for _ in "kv"
        )
        cpu.store_kv(ours, k, v, slots)
        reference.store_kv(theirs, k, v, slots)
    return ours, theirs


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds)
def test_attention_matches_reference(seed: int) -> None:
    rng = Random(seed)
    kv_heads, sharing, dim = rng.randint(1, 3), rng.randint(1, 8), 16 * rng.choice((*range(1, 10), 16, 17, 20, 32))
    dtype, block_size = rng.choice(DTYPES), 16 * rng.randint(1, 5)
    spec = KVSpec(kv_heads, dim, NAMES[dtype], block_size, rng.choice(KV_QUANTIZATIONS))
    batch, tokens, blocks = draw_batch(rng, block_size, rng.randint(1, 5))
    ours, theirs = fill(spec, batch, blocks, rng)
    q = randn(seed, tokens, kv_heads * sharing, dim, dtype=dtype)
    window, softcap = rng.choice((0, 0, 1, 7, 40)), rng.choice((0.0, 0.0, 0.5, 30.0))
    sinks = rng.choice((None, randn(seed + 1, kv_heads * sharing) * rng.choice((1, 100))))
    causal, chunked = rng.choice(((False, False), (True, False), (True, True)))
    slopes = torch.tensor([2.0 ** -rng.randint(0, 8) for _ in range(kv_heads * sharing)])
    alibi = rng.choice((None, slopes)) if causal else None
    options = {"softcap": softcap, "sinks": sinks, "causal": causal, "chunked": chunked, "alibi": alibi}
    got = cpu.attention(q, ours, batch.attention, AttentionOptions(dim**-0.5, window, **options))
    expected = reference.attention(q, theirs, batch.attention, AttentionOptions(dim**-0.5, window, **options))
    if spec.quantization and sinks is not None:
        assert (got - expected).float().abs().max() < 0.12
    elif spec.quantization:
        error = (got - expected).float()
        assert error.square().mean() < 4e-4 * expected.float().square().mean()
        assert error.abs().max() < 0.12
    else:
        assert_close(got, expected)


def columns(rows: int, first: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor of ones, and a view of some of its columns."""
    whole = torch.ones(rows, first + count + 5, dtype=dtype)
    return whole, whole[:, first : first + count]


@few
@given(seed=seeds, format=st.sampled_from([Format(), *FORMATS]))
def test_ops_write_only_to_the_given_output(seed: int, format: Format) -> None:
    """Ranks write their outputs to columns of a larger tensor: with the same bits, and without changing other
    columns."""
    rng = Random(seed)
    rows, inputs, outputs, first = rng.randint(1, 40), rng.randint(1, 100), 64 * rng.randint(1, 3), rng.randrange(9)
    x, weight = (randn(seed + i, n, inputs, dtype=torch.bfloat16) for i, n in enumerate((rows, 2 * outputs)))
    q, kv = randn(seed, rows, 4, 16, dtype=torch.bfloat16), KVSpec(2, 16, "bfloat16", 16)
    slots = torch.randint(-1, 3, (rows,), dtype=torch.int32)
    positions = torch.arange(rows)
    table = torch.arange(3, dtype=torch.int32)[None]
    metadata = AttentionMetadata(torch.tensor([0, rows]).int(), torch.tensor([rows]).int(), table)

    def check(module: Any, adapters: Any) -> None:
        matrix, cache = module.pack([weight], None, format), module.new_kv_cache([kv], 3, x.device)[0]
        module.store_kv(cache, q[:, :2], q[:, 2:], positions)
        for width, compute in (
            (2 * outputs, lambda out: module.linear(x, matrix, False, out)),
            (outputs, lambda out: module.linear_activation_and_mul(x, matrix, "silu", out)),
            (outputs, lambda out: module.activation_and_mul(module.linear(x, matrix), "silu", out)),
            (64, lambda out: module.attention(q, cache, metadata, AttentionOptions(0.25), out)),
            (2 * outputs, lambda out: module.add_lora(module.linear(x, matrix, False, out), x, adapters, slots)),
        ):
            whole, part = columns(rows, first, width, x.dtype)
            expected, got = compute(None), compute(part)
            part.copy_(got)  # add_lora may return another tensor than the given output
            assert torch.equal(part, expected)
            part.fill_(1)
            assert whole.eq(1).all()
        ids, found = torch.randint(2 * outputs + 20, (rows,)), torch.ones(rows, inputs, dtype=x.dtype)
        local = (ids >= 7) & (ids < 7 + 2 * outputs)
        module.embedding(ids, matrix, 7, found)
        assert torch.equal(found[local], module.embedding(ids[local] - 7, matrix)) and found[~local].eq(1).all()

    for module, adapters in zip((cpu, reference), draw_adapters(rng, inputs, [2 * outputs], x.dtype, 3), strict=True):
        check(module, adapters)


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds)
def test_results_do_not_depend_on_batch_or_threads(seed: int) -> None:
    """Every row has the same bits alone, in any split of the batch, and with one or two threads."""
    rng = Random(seed)
    dtype, rows = rng.choice(DTYPES), rng.randint(2, 300)
    matrix = cpu.pack([randn(seed, rng.randint(1, 200), rng.randint(1, 200), dtype=dtype)])
    x = randn(seed + 1, rows, matrix.inputs, dtype=dtype)
    whole = cpu.linear(x, matrix)
    cut = rng.randint(1, rows - 1)
    cpu.set_threads(1)
    parts = torch.cat([cpu.linear(x[:cut], matrix), cpu.linear(x[cut:], matrix)])
    cpu.set_threads(2)
    assert torch.equal(whole, parts)

    spec = KVSpec(2, 32, NAMES[dtype], 16, rng.choice(KV_QUANTIZATIONS))
    batch, tokens, blocks = draw_batch(rng, 16, 4)
    cache, _ = fill(spec, batch, blocks, rng)
    q = randn(seed, tokens, 6, 32, dtype=dtype)
    whole = cpu.attention(q, cache, batch.attention, AttentionOptions(0.2))
    for i, (begin, end) in enumerate(
        zip(batch.attention.query_start_loc[:-1].tolist(), batch.attention.query_start_loc[1:].tolist(), strict=True)
    ):
        row = rng.randrange(begin, end)
        alone = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=batch.positions[row : row + 1].int() + 1,
            block_tables=batch.attention.block_tables[i : i + 1].contiguous(),
        )
        assert torch.equal(cpu.attention(q[row : row + 1], cache, alone, AttentionOptions(0.2))[0], whole[row])


@pytest.mark.slow_after(1)
@few
@given(seed=seeds, format=st.sampled_from([Format(), *FORMATS]) | quantized)
def test_captured_step_equals_its_calls(seed: int, format: Format) -> None:
    """The step has every op, for batches of any size, and is repeated after other batches."""
    rng = Random(seed)
    spec = KVSpec(2, 16, "bfloat16", 16, rng.choice(KV_QUANTIZATIONS))
    shapes = ((50, 64), (128, 64), (64, 64), (256, 64), (64, 128))

    def pack(outputs: int, inputs: int) -> Any:
        if format in (Format(), *FORMATS):
            return cpu.pack([randn(rng.getrandbits(31), outputs, inputs, dtype=torch.bfloat16) / 8], None, format)
        stored = draw_quantized(rng, outputs, inputs, format, ordered=True)
        return cpu.pack_quantized([replace(stored, scales=stored.scales / 8)], torch.bfloat16)

    vocabulary, qkv, out, gate_up, back = (pack(*shape) for shape in shapes)
    gain, table = randn(seed, 64, dtype=torch.bfloat16), randn(seed + 9, 160, 16)

    def step(batch: Batch) -> Tensor:
        x, queries, slots = cpu.embedding(batch.token_ids, vocabulary), batch.attention, batch.lora_slots
        for last in (False, True):
            parts = cpu.linear(cpu.rms_norm(x, gain, 1e-6), qkv).split([64, 32, 32], -1)
            q, k, v = (part.unflatten(-1, (-1, 16)) for part in parts)
            q, k = (cpu.rope(part, batch.positions, table) for part in (q, k))
            cpu.store_kv(cache, k, v, batch.slot_mapping)
            if last:
                q, x, queries = (
                    cpu.index_select(q, batch.logits_indices),
                    cpu.index_select(x, batch.logits_indices),
                    batch.logits_attention,
                )
                slots = batch.logits_lora_slots
            attended = cpu.attention(q, cache, queries, AttentionOptions(0.25))
            added = cpu.linear(attended, out)
            if slots is not None:
                added = cpu.add_lora(added, attended, adapters, slots)
            added, x = cpu.add_rms_norm(added, x, gain, 1e-6)
            _, x = cpu.add_rms_norm(cpu.linear(swiglu(added, gate_up), back), x, gain, 1e-6)
        return x

    batches = [draw_batch(rng, 16, rng.randint(1, 5)) for _ in range(3)]
    cache = fill(spec, batches[0][0], 60, rng, 0)[0]
    adapters, _ = draw_adapters(rng, 64, [64], torch.bfloat16, 3)
    captured, with_lora = (cpu.capture(step, CaptureOptions(600, 5, 10, use_lora=lora)) for lora in (False, True))
    for batch, tokens, _ in [*batches, batches[0]]:
        batch.token_ids[:] = torch.randint(50, (tokens,))
        batch.slot_mapping[:] = torch.arange(tokens)
        expected = step(batch)
        assert len(expected) == len(batch.logits_indices)
        assert torch.equal(captured(batch), expected)
        batch.lora_slots = torch.randint(-1, 3, (tokens,), dtype=torch.int32)
        batch.logits_lora_slots = batch.lora_slots[batch.logits_indices]
        assert torch.equal(with_lora(batch), step(batch))
        batch.lora_slots = batch.logits_lora_slots = None
    with pytest.raises(RuntimeError, match="contiguous"):
        cpu.capture(lambda b: cpu.linear(cpu.embedding(b.token_ids, vocabulary)[:, ::2], out), CaptureOptions(9, 1, 1))


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds)
def test_kv_cache_export_and_import_match_reference(seed: int) -> None:
    """Ranks with other heads and block sizes import exactly the exported keys and values, and the bytes in the transfer
    buffer equal the reference's."""
    rng = Random(seed)
    heads, sharing, dim, tokens = rng.choice((2, 4)), rng.randint(1, 3), 16 * rng.randint(1, 9), rng.randint(1, 150)
    dtype, quantization, slot_tokens = rng.choice(DTYPES), rng.choice(KV_QUANTIZATIONS), rng.choice((16, 48, 64))
    sent, slots = rng.randint(1, tokens), -(-tokens // slot_tokens)
    numbers = torch.tensor(rng.sample(range(slots + 2), slots))
    positions = torch.arange(tokens)
    places = numbers[positions // slot_tokens] * slot_tokens + positions % slot_tokens
    places[sent:] = -1
    k, v = (randn(seed + i, tokens, heads, dim, dtype=dtype) for i in range(2))
    k[rng.randrange(tokens)] = 0
    q = randn(seed + 2, tokens, heads * sharing, dim, dtype=dtype)[:sent]

    class Instance:
        """Caches of several ranks, each with a shard of the heads; if there are more ranks than heads, ranks share
        heads."""

        def __init__(self, ops: Any, ranks: int, block_size: int) -> None:
            self.ops, local_heads, blocks = ops, max(heads // ranks, 1), -(-tokens // block_size)
            self.table = torch.tensor([rng.sample(range(blocks), blocks)], dtype=torch.int32)
            self.slots = self.table[0].long()[positions // block_size] * block_size + positions % block_size
            firsts = (heads * rank // ranks for rank in range(ranks))
            self.shards = [slice(first, first + local_heads) for first in firsts]
            spec, other = KVSpec(local_heads, dim, NAMES[dtype], block_size, quantization), KVSpec(3, 32, "float32")
            layout = transfer_layouts([other, replace(spec, kv_heads=heads), other], slot_tokens)[1]
            self.layouts = [replace(layout, first_head=shard.start) for shard in self.shards]
            self.caches = [ops.new_kv_cache([spec], blocks, k.device)[0] for _ in self.shards]

        def store(self) -> None:
            for cache, shard in zip(self.caches, self.shards, strict=True):
                self.ops.store_kv(cache, k[:, shard], v[:, shard], self.slots)

        def exported(self) -> Tensor:
            buffer = torch.full(((slots + 2) * self.layouts[0].slot_bytes,), 99, dtype=torch.uint8)
            for cache, layout in zip(self.caches, self.layouts, strict=True):
                progress = torch.tensor([7])
                self.ops.export_kv(cache, self.slots, buffer, places, layout, progress)
                assert progress.item() == 8
            return buffer

        def import_from(self, buffer: Tensor) -> None:
            for cache, layout in zip(self.caches, self.layouts, strict=True):
                self.ops.import_kv(cache, self.slots, buffer, places, layout)

        def attention(self) -> list[Tensor]:
            starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, sent], [sent]))
            queries = (q[:, shard.start * sharing : shard.stop * sharing] for shard in self.shards)
            return [
                self.ops.attention(
                    part.contiguous(),
                    cache,
                    AttentionMetadata(starts, lengths, self.table),
                    AttentionOptions(dim**-0.5),
                )
                for part, cache in zip(queries, self.caches, strict=True)
            ]

    def draw() -> tuple[int, int]:
        return rng.choice((1, 2, 2 * heads)), 16 * rng.randint(1, 8)

    theirs = draw()
    sender, stored, receiver, expected, other = (
        Instance(ops, *sizes)
        for ops, sizes in (
            (cpu, draw()),
            (reference, draw()),
            (cpu, theirs),
            (cpu, (theirs[0], draw()[1])),  # attention does not depend on the block size
            (reference, draw()),
        )
    )
    for instance in (sender, stored, expected):
        instance.store()
    buffer = sender.exported()
    assert torch.equal(buffer, stored.exported())
    for instance in (receiver, other):
        instance.import_from(buffer)
        assert torch.equal(instance.exported(), buffer)
    for outputs in zip(receiver.attention(), expected.attention(), strict=True):
        assert torch.equal(*outputs)


@few
@given(seed=seeds)
def test_gathered_keys_and_values_match_reference(seed: int) -> None:
    rng = Random(seed)
    heads, dim, size, dtype = rng.randint(1, 3), 16 * rng.randint(1, 8), 16 * rng.randint(1, 4), rng.choice(DTYPES)
    spec = KVSpec(heads, dim, NAMES[dtype], size, rng.choice(KV_QUANTIZATIONS))
    tokens = rng.randint(1, 3 * size)
    blocks = torch.tensor([*rng.sample(range(5), 3), 0], dtype=torch.int32)
    slots = (blocks[:3, None] * size + torch.arange(size)).flatten()[:tokens].long()
    k, v = (randn(seed + i, tokens, heads, dim, dtype=dtype) for i in range(2))
    found = []
    for ops in (cpu, reference):
        (cache,) = ops.new_kv_cache([spec], 5, torch.device("cpu"))
        ops.store_kv(cache, k, v, slots)
        found.append(ops.gather_kv(cache, blocks, tokens))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    if not spec.quantization:
        assert torch.equal(found[0][0], k) and torch.equal(found[0][1], v)


@few
@given(seed=seeds)
def test_captured_step_exports_kv_of_given_tokens(seed: int) -> None:
    """A step exports the tokens in ``export_places``, layer by layer; otherwise buffer and progress are unchanged."""
    rng = Random(seed)
    spec, slots = KVSpec(2, 16, "bfloat16", 32, rng.choice(KV_QUANTIZATIONS)), 6
    vocabulary = cpu.pack([randn(seed, 50, 64, dtype=torch.bfloat16)])
    caches, layouts = cpu.new_kv_cache([spec] * 2, 40, torch.device("cpu")), transfer_layouts([spec] * 2, 16)
    buffer, progress = torch.zeros(slots * layouts[0].slot_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)

    def step(batch: Batch) -> Tensor:
        k, v = cpu.embedding(batch.token_ids, vocabulary).unflatten(-1, (-1, 16)).split(2, 1)
        for cache, layout in zip(caches, layouts, strict=True):
            cpu.store_kv(cache, k, v, batch.slot_mapping)
            if batch.export_places is not None:
                cpu.export_kv(cache, batch.slot_mapping, buffer, batch.export_places, layout, progress)
        queries = cpu.index_select(cpu.embedding(batch.token_ids, vocabulary), batch.logits_indices)
        return cpu.attention(queries.unflatten(-1, (-1, 16)), caches[1], batch.logits_attention, AttentionOptions(0.25))

    captured = cpu.capture(step, CaptureOptions(600, 5, 10))
    for share in (0.5, 0.0, None, 1.0, None):
        batch, tokens, _ = draw_batch(rng, 32, rng.randint(1, 5))
        batch.token_ids[:] = torch.randint(50, (tokens,))
        batch.slot_mapping[:] = torch.arange(tokens)
        exported = 0
        if share is not None:
            exported = int(min(tokens, 16 * slots) * share)
            batch.export_places = torch.full((tokens,), -1)
            batch.export_places[torch.randperm(tokens)[:exported]] = torch.randperm(16 * slots)[:exported]
        results = []
        for compute in (step, captured):
            buffer.zero_()
            progress.fill_(40)
            results.append((compute(batch).clone(), buffer.clone()))
            assert progress.item() == 40 + 2 * (exported > 0)
            assert buffer.any() == (exported > 0)
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)


def draw_adapters(rng: Random, inputs: int, sizes: list[int], dtype: torch.dtype, slots: int) -> tuple[Any, Any]:
    """LoRA slots of a layer for the kernels and the reference, with adapters of some or all of its matrices."""
    shape = slots, inputs, sum(sizes), 70 * len(sizes), dtype, torch.device("cpu")
    ours, theirs = cpu.new_lora_slots(*shape), reference.new_lora_slots(*shape)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    for slot in range(slots):
        parts = [
            LoRAWeights(
                randn(rng.getrandbits(31), rank, inputs, dtype=dtype) / inputs**0.5,
                randn(rng.getrandbits(31), size, rank, dtype=dtype),
                first,
                rng.choice((0.5, 1.7)),
            )
            for first, size in zip(firsts, sizes, strict=True)
            if rng.random() < 0.8
            for rank in [rng.randint(1, 70)]
        ]
        if parts:
            cpu.set_lora(ours, slot, cpu.pack_lora(parts))
            reference.set_lora(theirs, slot, reference.pack_lora(parts))
    return ours, theirs


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=seeds, dtype=dtypes)
def test_lora_matches_reference_in_any_batch(seed: int, dtype: torch.dtype) -> None:
    """Rows with different adapters or no adapter, in any order, have the same bits as alone."""
    rng = Random(seed)
    rows, inputs, sizes = (
        rng.randint(1, 300),
        rng.randint(1, 300),
        [rng.randint(1, 200) for _ in range(rng.randint(1, 3))],
    )
    ours, theirs = draw_adapters(rng, inputs, sizes, dtype, 4)
    x, out = randn(seed, rows, inputs, dtype=dtype), randn(seed + 1, rows, sum(sizes), dtype=dtype)
    slots = torch.tensor([rng.randint(-1, 3) for _ in range(rows)], dtype=torch.int32)
    got = cpu.add_lora(out.clone(), x, ours, slots)
    assert_close(got, reference.add_lora(out.clone(), x, theirs, slots), 10)
    assert torch.equal(got[slots < 0], out[slots < 0])
    cut = rng.randint(0, rows)
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    for chosen in (shuffled[:cut], shuffled[cut:]):
        alone = cpu.add_lora(out[chosen].clone(), x[chosen], ours, slots[chosen])
        assert torch.equal(alone, got[chosen])
    cpu.set_lora(ours, 0, None)
    assert torch.equal(cpu.add_lora(out.clone(), x, ours, slots)[slots == 0], out[slots == 0])


def test_nan_and_infinity_affect_only_their_row() -> None:
    weight, x = randn(0, 70, 40, dtype=torch.bfloat16), randn(1, 5, 40, dtype=torch.bfloat16)
    for format in FORMATS:
        matrix = cpu.pack([weight], None, format)
        changed = x.clone()
        changed[1, 3], changed[2, 5], changed[3] = float("nan"), float("inf"), 1e-38
        expected, got = cpu.linear(x, matrix), cpu.linear(changed, matrix)
        assert torch.equal(got[[0, 4]], expected[[0, 4]])
        assert not got[[1, 2]].isfinite().any()
        assert got[3].abs().max() < 1e-30


def test_unsupported_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        Format(4, 20, 8)
    with pytest.raises(PenstockError, match="multiple of 16"):
        cpu.new_kv_cache([KVSpec(1, 64, "float32", 20)], 1, torch.device("cpu"))
    with pytest.raises(PenstockError, match="fp8 is not supported on CPUs"):
        cpu.new_kv_cache([KVSpec(1, 64, "float32", 16, "fp8")], 1, torch.device("cpu"))
    with pytest.raises(PenstockError, match=r"compute capability 8\.9"):
        cpu.pack([torch.zeros(4, 4)], None, SCHEMES["fp8"].layers)
    with pytest.raises(PenstockError, match="bfloat16 or float32"):
        cpu.pack([torch.zeros(4, 4, dtype=torch.float16)])
    with pytest.raises(ValueError, match="no kernels for avx9000; it has"):
        kernels.use("avx9000")
    assert backend(torch.device("cpu")).NAME == "cpu"
