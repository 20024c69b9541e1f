"""Matrix products, embeddings and LoRA of the CUDA backend in Triton's interpreter: equal to the reference ops, with
the same bits in any batch."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import interpreted  # must precede the import of the kernels
import pytest
import torch
from torch import Tensor

from penstock.core import PenstockError
from penstock.core.quantization import SCHEMES
from penstock.ops import Format, LoRAWeights, QuantizedWeight, reference
from penstock.ops.activations import ACTIVATIONS, GATES
from penstock.ops.cuda import launch, lora, matrix
from penstock.ops.cuda.tiles import Size, Tile, sizes

FORMATS = {name: scheme.layers for name, scheme in SCHEMES.items()} | {
    "fp8 per tensor": Format(8, activation_bits=8, floating=True, rows_per_scale=0),
    "fp8 blocks": Format(8, 128, 8, floating=True, rows_per_scale=128),
}


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values in ``dtype`` that float16 can represent."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(dtype)


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max() / expected.abs().max()
    assert error < tolerance, error


def tolerance(dtype: torch.dtype) -> float:
    """Maximum error, relative to the largest output."""
    return 2e-3 if dtype is torch.float16 else 2e-6


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, torch.float16) for name in FORMATS] + [("none", torch.float32), ("wint8", torch.float32)]
)
def test_products_and_embeddings_match_reference(name: str, dtype: torch.dtype) -> None:
    """Tests any sizes, strided rows, a bias, float32 outputs, gated activations, and embeddings."""
    format = FORMATS[name]
    for seed, (tokens, outputs, inputs) in enumerate([(1, 64, 256), (5, 70, 301), (33, 130, 60)]):
        x = randn(seed, tokens, inputs + 16, dtype=dtype)[:, :inputs]
        weight, bias = randn(seed + 1, outputs, inputs, dtype=dtype), randn(seed + 2, outputs, dtype=dtype)
        parts = [weight[: outputs // 3], weight[outputs // 3 :]]
        added = bias if seed % 2 else None
        packed = matrix.pack(parts, added, format)
        expected = reference.pack(parts, added, packed.format)
        out = torch.full((tokens, outputs + 9), 7, dtype=dtype)
        assert matrix.linear(x, packed, out=out[:, :outputs]) is not None and bool((out[:, outputs:] == 7).all())
        assert_close(out[:, :outputs], reference.linear(x, expected), tolerance(dtype))
        product = matrix.linear(x, packed, out_float32=True)
        if not format.bits:
            exact = x.double() @ weight.double().T + (0 if added is None else added.double())
            assert_close(product, exact.float(), 1e-6)
        assert torch.equal(product.to(dtype), out[:, :outputs])
        for function in (*ACTIVATIONS, *GATES):
            gated = matrix.linear_activation_and_mul(x, packed, function)
            expected_gated = reference.activation_and_mul(out[:, :outputs], function)
            assert_close(gated, expected_gated, 1e-6 if dtype is torch.float32 else 2e-3)
        ids = torch.tensor([outputs - 1, 0, outputs // 2])
        assert torch.equal(matrix.embedding(ids, packed), reference.embedding(ids, expected))
        shard = torch.full((3, inputs), 5, dtype=dtype)
        matrix.embedding(ids + 90, packed, first=91, out=shard)
        assert torch.equal(shard[[0, 2]], reference.embedding(ids[[0, 2]] - 1, expected))
        assert bool((shard[1] == 5).all())
        tensors = matrix.packed_tensors(packed)
        if format.bits:
            again = matrix.from_packed(tensors, inputs, outputs, dtype, added, format)
            assert torch.equal(matrix.linear(x, again), out[:, :outputs])
            with pytest.raises(PenstockError, match="unexpected size"):
                matrix.from_packed(tensors, inputs, outputs + 64, dtype, added, format)


STORED = {
    "4 bits, offsets": Format(4, 32, asymmetric=True),
    "4 bits, offsets, large groups": Format(4, 128, asymmetric=True),
    "4 bits, offsets, 8-bit activations": Format(4, 64, 8, asymmetric=True),
    "4 bits": Format(4, 64),
    "8 bits": Format(8),
    "8 bits, 8-bit activations": Format(8, activation_bits=8),
    "fp8": FORMATS["fp8"],
    "fp8 per tensor": FORMATS["fp8 per tensor"],
    "fp8 blocks": FORMATS["fp8 blocks"],
    "mxfp4": Format(4, 32, floating=True),
}
"""Formats of quantized checkpoints."""


def draw_quantized(seed: int, outputs: int, inputs: int, format: Format, order: Tensor | None) -> QuantizedWeight:
    generator, most = torch.Generator().manual_seed(seed), 1 << (format.bits - 1)
    rows, groups = -(-outputs // (format.rows_per_scale or outputs)), -(-inputs // (format.group_size or inputs))
    values = torch.randint(-most, most, (outputs, inputs), generator=generator).to(torch.int8)
    scales, offsets = (torch.randn(rows, groups, generator=generator) for _ in range(2))
    if format.is_mxfp4:
        scales = torch.exp2(scales.round())
    elif format.floating:
        values = values.float().to(torch.float8_e4m3fn)
    return QuantizedWeight(values, scales / most, format, offsets if format.asymmetric else None, order)


@pytest.mark.parametrize("name", STORED)
def test_checkpoint_weights_match_reference_in_any_batch(name: str) -> None:
    """Stacked matrices, with an input order (``desc_act``), with a bias, from the weight cache and row by row."""
    format, dtype = STORED[name], torch.float16
    assert matrix.supports(format, dtype) and matrix.supports(format, torch.bfloat16)
    for seed, (tokens, heights, inputs) in enumerate([(1, (64,), 256), (5, (128, 6), 301), (33, (128, 130), 60)]):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(inputs, generator=generator) if seed == 1 and not format.floating else None
        parts = [draw_quantized(seed + height, height, inputs, format, order) for height in heights]
        x, outputs = randn(seed, tokens, inputs, dtype=dtype), sum(heights)
        bias = randn(seed + 2, outputs, dtype=dtype) if seed else None
        ours, theirs = (ops.pack_quantized(parts, dtype, bias) for ops in (matrix, reference))
        got = matrix.linear(x, ours)
        assert_close(got, reference.linear(x, theirs), tolerance(dtype))
        ids = torch.tensor([outputs - 1, 0, outputs // 2])
        assert torch.equal(matrix.embedding(ids, ours), reference.embedding(ids, theirs))
        cached = matrix.from_packed(matrix.packed_tensors(ours), inputs, outputs, dtype, bias, format)
        for row in {0, tokens // 2, tokens - 1}:
            assert torch.equal(matrix.linear(x[row : row + 1], cached)[0], got[row])


def test_formats_without_kernels_are_not_supported() -> None:
    integers = Format(8, 32), Format(8, asymmetric=True), Format(4, 16), Format(4)
    for format in (*integers, Format(8, floating=True), Format(4, 64, floating=True)):
        assert not matrix.supports(format, torch.bfloat16)


def rows_differ(format: Format, dtype: torch.dtype, gated: bool, monkeypatch: pytest.MonkeyPatch) -> list[Size]:
    """Sizes of tiles with which the bits of 40 rows differ from the bits in the whole batch with the default tile."""
    inputs, outputs, tokens = 260, 70, 130
    if format.asymmetric:
        packed = matrix.pack_quantized([draw_quantized(1, outputs, inputs, format, None)], dtype)
    else:
        packed = matrix.pack([randn(1, outputs, inputs, dtype=dtype)], None, format)
    x = randn(2, tokens, inputs, dtype=dtype)
    op = partial(matrix.linear_activation_and_mul, function="silu") if gated else matrix.linear
    together = op(x, packed)
    chosen = torch.randperm(tokens, generator=torch.Generator().manual_seed(3))[:40]
    differ = []
    x_bytes = 1 if format.activation_bits else x.itemsize
    for size in sizes(launch.DEFAULT_ARCHITECTURE, x_bytes, format):
        tile = Tile(size.bn, size.bt, size.bk, 16 if size.bt == 64 else size.bn, 4, 2)
        monkeypatch.setattr(matrix, "_tile", lambda *_, tile=tile: tile)
        if not torch.equal(op(x[chosen], packed), together[chosen]):
            differ.append(size)
    return differ


ROWS = ("none", "w8a8", "wint4-g32", "fp8 blocks", "4 bits, offsets, 8-bit activations")
"""Formats of the default suite; each other format, tested with ``thorough``, is similar to one of them."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ROWS else pytest.mark.thorough)
        for name in (*FORMATS, "4 bits, offsets", "4 bits, offsets, 8-bit activations")
    ],
)
def test_rows_have_same_bits_in_any_batch_and_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not rows_differ((FORMATS | STORED)[name], torch.float16, False, monkeypatch)


@pytest.mark.parametrize(("dtype", "gated"), [(torch.float16, True), (torch.float32, False)])
def test_gated_and_float32_rows_have_same_bits_in_any_tile(
    dtype: torch.dtype, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not rows_differ(Format(), dtype, gated, monkeypatch)


def test_different_summation_order_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """``rows_differ`` detects tiles with another matrix instruction, which has another order of summation."""
    monkeypatch.setattr(interpreted, "step", lambda columns: 32 if columns > 32 else 16)
    assert rows_differ(Format(), torch.float16, False, monkeypatch)


def test_formats_without_kernels_are_refused() -> None:
    weight = torch.zeros(128, 128, dtype=torch.bfloat16)
    with launch.record_launches(launch.ARCHITECTURES[80]), pytest.raises(PenstockError, match=r"capability 8\.9"):
        matrix.pack([weight], None, FORMATS["fp8"])
    with pytest.raises(PenstockError, match="no CUDA kernels"):
        matrix.pack([weight], None, Format(4, 24))
    with pytest.raises(PenstockError, match="float64"):
        matrix.pack([weight.double()])


def draw_adapters(rng: Random, inputs: int, sizes: list[int], dtype: torch.dtype, slots: int) -> tuple[Any, Any]:
    """LoRA slots of a layer for the kernels and the reference, with adapters of some or all of its matrices."""
    shape = slots, inputs, sum(sizes), 40 * len(sizes), dtype, torch.device("cpu")
    ours, theirs = lora.new_lora_slots(*shape), reference.new_lora_slots(*shape)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    for slot in range(slots):
        parts = [
            LoRAWeights(
                randn(rng.getrandbits(31), rank, inputs, dtype=dtype) / 16,
                randn(rng.getrandbits(31), size, rank, dtype=dtype),
                first,
                rng.choice((0.5, 1.7)),
            )
            for first, size in zip(firsts, sizes, strict=True)
            if rng.random() < 0.8
            for rank in [rng.randint(1, 40)]
        ]
        if parts:
            lora.set_lora(ours, slot, lora.pack_lora(parts))
            reference.set_lora(theirs, slot, reference.pack_lora(parts))
    return ours, theirs


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float16), (1, torch.float32), (2, torch.float16)])
def test_lora_matches_reference_in_any_batch(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with several adapters and without adapter, in any order, have the same bits as alone."""
    monkeypatch.setattr(lora, "SMALL_TILE_TOKENS", 20)
    monkeypatch.setattr(lora, "SPLIT", 128)
    rng = Random(seed)
    rows, inputs, sizes = 40, rng.randint(100, 300), [rng.randint(1, 90) for _ in range(rng.randint(1, 3))]
    ours, theirs = draw_adapters(rng, inputs, sizes, dtype, 3)
    x, out = randn(seed, rows, inputs, dtype=dtype), randn(seed + 1, rows, sum(sizes), dtype=dtype)
    slots = torch.tensor([rng.randint(-1, 2) for _ in range(rows)], dtype=torch.int32)
    got = lora.add_lora(out.clone(), x, ours, slots)
    assert_close(got, reference.add_lora(out.clone(), x, theirs, slots), 2e-3 if dtype is torch.float16 else 1e-5)
    assert torch.equal(got[slots < 0], out[slots < 0])
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    for chosen in (shuffled[:11], shuffled[11:]):
        alone = lora.add_lora(out[chosen].clone(), x[chosen], ours, slots[chosen])
        assert torch.equal(alone, got[chosen])
    lora.set_lora(ours, 0, None)
    assert torch.equal(lora.add_lora(out.clone(), x, ours, slots)[slots == 0], out[slots == 0])
