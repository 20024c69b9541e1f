"""Elementwise, KV cache and attention kernels of the CUDA backend in Triton's interpreter: equal to the reference ops
on random shapes, with the same bits in any batch."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace
from importlib import import_module
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from penstock.checkpoint.kv_spec import transfer_layouts
from penstock.core import PenstockError
from penstock.ops import AttentionMetadata, AttentionOptions, KVSpec, QKNorms, cuda, reference
from penstock.ops.activations import ACTIVATIONS, GATES
from penstock.ops.cuda import elementwise, kv_cache
from penstock.ops.cuda.launch import record_launches
from penstock.ops.reference.kv_cache import quantize

attention = import_module("penstock.ops.cuda.attention")  # "from penstock.ops.cuda import" would import the op
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
NAMES = {torch.float32: "float32", torch.float16: "float16"}
KV_QUANTIZATIONS = ("", "int8", "fp8")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
FEW = range(5)


def randn(rng: Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(31))).to(dtype)


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("seed", FEW)
def test_elementwise_ops_match_reference(seed: int) -> None:
    """Norms, residuals, RoPE and gated activations, also of strided rows. Each row has the same bits alone."""
    rng = Random(seed)
    dtype, rows, size, heads = rng.choice(DTYPES), rng.randint(1, 5), rng.randint(1, 300), rng.randint(1, 10)
    weight = randn(rng, size, dtype=dtype)
    x, residual = (randn(rng, rows, size + 3, dtype=dtype)[:, 2:-1] for _ in range(2))
    strided = randn(rng, rows, heads * size + 7, dtype=dtype)[:, 3 : 3 + heads * size].view(rows, heads, size)
    for inputs in (x, strided):
        got = elementwise.rms_norm(inputs, weight, 1e-6)
        assert_close(got, reference.rms_norm(inputs, weight, 1e-6))
        assert torch.equal(got[-1:], elementwise.rms_norm(inputs[-1:], weight, 1e-6))
    residual = residual.contiguous()
    expected = reference.add_rms_norm(x, residual, weight, 1e-6)
    for ours, theirs in zip(elementwise.add_rms_norm(x, residual.clone(), weight, 1e-6), expected, strict=True):
        assert_close(ours, theirs)
    assert_close(elementwise.add_residual(x, residual.clone()), expected[1])

    half = rng.randint(1, 70)
    positions, table = torch.randint(50, (rows,)), randn(rng, 50, 2 * half)
    q = randn(rng, rows, heads * 2 * half + 5, dtype=dtype)[:, : heads * 2 * half].view(rows, heads, 2 * half)
    assert_close(elementwise.rope(q, positions, table), reference.rope(q, positions, table))
    gate_up, whole = randn(rng, rows, 2 * size, dtype=dtype) * 4, torch.ones(rows, size + 9, dtype=dtype)
    out = whole[:, 4 : 4 + size]
    assert elementwise.activation_and_mul(gate_up, "silu", out) is out
    assert_close(out, reference.activation_and_mul(gate_up, "silu"))
    assert whole[:, :4].eq(1).all() and whole[:, 4 + size :].eq(1).all()
    chosen = torch.randint(rows, (7,))
    assert torch.equal(elementwise.index_select(strided, chosen), strided[chosen])
    assert torch.equal(elementwise.clone(x), x)


@pytest.mark.parametrize("seed", FEW)
def test_ops_on_residual_streams_match_reference(seed: int) -> None:
    rng = Random(seed)
    dtype, rows, size, count = rng.choice(DTYPES), rng.randint(1, 5), rng.randint(1, 300), rng.randint(2, 8)
    x, whole = randn(rng, rows, size, dtype=dtype), randn(rng, rows, count * size, dtype=dtype)
    for number in (rows, 1):  # weights of each token, or the same for all
        weights = randn(rng, number, count * (count + 2))
        collapsed = [ops.collapse_streams(whole, weights, count) for ops in (cuda, reference)]
        assert_close(*collapsed)
        mixed = [ops.mix_streams(x, whole.clone(), weights, count) for ops in (cuda, reference)]
        assert_close(*mixed)
    equal = [ops.equalize_streams(whole.clone(), count, 1e-5) for ops in (cuda, reference)]
    assert_close(*equal)


@pytest.mark.parametrize("seed", FEW)
def test_norm_activation_scale_and_rope_variants_match_reference(seed: int) -> None:
    """Norms with float32 weights, layer norms, GELU, scale, and interleaved or partial RoPE."""
    rng = Random(seed)
    dtype, rows, size, heads = rng.choice(DTYPES), rng.randint(1, 5), rng.randint(1, 300), rng.randint(1, 10)
    weight, bias, per_head = randn(rng, size), randn(rng, size), randn(rng, heads, size)
    x, residual = (randn(rng, rows, size + 3, dtype=dtype)[:, 2:-1] for _ in range(2))
    strided = randn(rng, rows, heads * size + 7, dtype=dtype)[:, 3 : 3 + heads * size].view(rows, heads, size)
    assert_close(elementwise.rms_norm(strided, weight, 1e-6), reference.rms_norm(strided, weight, 1e-6))
    residual = residual.contiguous()
    expected = reference.add_rms_norm(x, residual, weight, 1e-6)
    for ours, theirs in zip(elementwise.add_rms_norm(x, residual.clone(), weight, 1e-6), expected, strict=True):
        assert_close(ours, theirs)
    assert_close(elementwise.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    got = elementwise.layer_norm(strided, per_head, None, 1e-5)
    assert_close(got, reference.layer_norm(strided, per_head, None, 1e-5))
    gate_up = randn(rng, rows, 2 * size, dtype=dtype) * 4
    for function in ACTIVATIONS:
        assert_close(elementwise.activation(x, function), reference.activation(x, function))
    for function in (*ACTIVATIONS, *GATES):
        assert_close(elementwise.activation_and_mul(gate_up, function), reference.activation_and_mul(gate_up, function))
    for factor, cap in ((0.3, 0.0), (2.0, 5.0), (1.0, 30.0)):
        assert_close(elementwise.scale(x, factor, cap), reference.scale(x, factor, cap))
    multiplier = rng.uniform(-2, 3)
    assert_close(elementwise.gaussian_topk(x, multiplier), reference.gaussian_topk(x, multiplier))
    dim = rng.choice((16, 80, 128))
    rotary, interleaved = rng.choice((0, dim // 2, dim)), rng.random() < 0.5
    positions, table = torch.randint(50, (rows,)), randn(rng, 50, rotary)
    q = randn(rng, rows, heads * dim + 5, dtype=dtype)[:, : heads * dim].view(rows, heads, dim)
    got = elementwise.rope(q, positions, table, interleaved)
    assert_close(got, reference.rope(q, positions, table, interleaved))


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("quantization", KV_QUANTIZATIONS)
def test_rope_and_store_equals_separate_kernels(quantization: str, seed: int) -> None:
    """The fused kernel stores and returns the same bits as separate kernels, and nearly the values of the reference.
    Padding writes nothing."""
    rng = Random(seed)
    dtype, heads, group, dim = rng.choice(DTYPES), rng.randint(1, 3), rng.randint(1, 5), rng.choice((16, 32, 80, 128))
    spec, blocks, tokens = KVSpec(heads, dim, NAMES[dtype], 16 * rng.randint(1, 5), quantization), 3, rng.randint(1, 6)
    qkv = randn(rng, tokens, (group + 2) * heads * dim + 16, dtype=dtype)[:, 16:]
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split([n * heads * dim for n in (group, 1, 1)], -1))
    k[rng.randrange(tokens)] = 0
    slots = torch.tensor(rng.sample(range(blocks * spec.block_size), tokens))
    positions, table = torch.randint(90, (tokens,)), randn(rng, 90, dim)
    padding = rng.random() < 0.5
    if padding:
        slots[-1] = positions[-1] = -1
    norms = QKNorms(randn(rng, dim, dtype=dtype), randn(rng, dim, dtype=dtype), 1e-5) if rng.random() < 0.7 else None
    fused, separate = (kv_cache.new_kv_cache([KVSpec(1, 48, "float32"), spec], blocks, CPU)[1] for _ in range(2))
    garbage = rng.randrange(256)
    for cache in (fused, separate):
        cache.pool.fill_(garbage)
    got = kv_cache.rope_and_store(q, k, v, positions, table, fused, slots, norms)
    valid = slice(0, tokens - padding)
    q, k, v, slots, positions = (each[valid] for each in (q, k, v, slots, positions))
    if norms:
        q, k = (elementwise.rms_norm(x, w, norms.eps) for x, w in ((q, norms.q_weight), (k, norms.k_weight)))
    q, k = (elementwise.rope(x, positions, table) for x in (q, k))
    kv_cache.store_kv(separate, k, v, slots)
    assert torch.equal(got[valid], q)
    assert torch.equal(fused.pool, separate.pool)
    written = torch.zeros(blocks * spec.block_size, dtype=torch.bool)
    written[slots] = True
    unwritten = fused.values.transpose(1, 3).flatten(0, 1)[~written].contiguous().view(torch.uint8)
    assert unwritten.eq(garbage).all()

    theirs = reference.new_kv_cache([spec], blocks, CPU)[0]
    reference.store_kv(theirs, k, v, slots)
    stored = fused.values.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, slots]
    expected = theirs.flatten(1, 2)[:, slots]
    if fused.scales is None:
        assert torch.equal(stored, expected)
        return
    numbers, scales = expected.view(torch.int8).split([dim, 4], -1)
    assert torch.equal(
        fused.scales.permute(1, 0, 3, 2).flatten(1, 2)[:, slots, :, None], scales.contiguous().view(torch.float32)
    )
    different = stored.view(torch.int8) != numbers
    if quantization == "fp8":  # the interpreter loses the carry when a mantissa is rounded up to a power of two
        assert different.float().mean() < 0.1
    else:
        assert not different.any()


class Sequences:
    """Sequences with random keys and values."""

    def __init__(self, rng: Random, dtype: torch.dtype, heads: int, dim: int, lengths: list[int]) -> None:
        self.rng, self.dtype, self.heads, self.dim = rng, dtype, heads, dim
        self.kv = [[randn(rng, length, heads, dim, dtype=dtype) for _ in "kv"] for length in lengths]

    def cache(
        self, module: Any, quantization: str, block_size: int, chosen: list[int], garbage: int
    ) -> tuple[Any, Tensor]:
        """A cache with the chosen sequences and garbage bytes in unused slots, and the block tables."""
        needed = [-(-len(self.kv[i][0]) // block_size) for i in chosen]
        free = self.rng.sample(range(1, sum(needed) + 3), sum(needed))
        tables = torch.zeros((len(chosen), max(needed) + self.rng.randint(0, 2)), dtype=torch.int32)
        spec = KVSpec(self.heads, self.dim, NAMES[self.dtype], block_size, quantization)
        cache = module.new_kv_cache([spec], sum(needed) + 3, CPU)[0]
        if module is kv_cache:
            cache.pool.fill_(garbage)
        for i, (number, blocks) in enumerate(zip(chosen, needed, strict=True)):
            tables[i, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
            at = torch.arange(len(self.kv[number][0]))
            slots = tables[i].long()[at // block_size] * block_size + at % block_size
            self.store(module, cache, quantization, *self.kv[number], slots)
        return cache, tables

    @staticmethod
    def store(module: Any, cache: Any, quantization: str, k: Tensor, v: Tensor, slots: Tensor) -> None:
        if module is reference:
            return module.store_kv(cache, k, v, slots)
        # The reference quantizes here: the interpreter runs one program per vector, and rounds to fp8 incorrectly.
        blocks, offsets = slots // cache.spec.block_size, slots % cache.spec.block_size
        for part, vectors in enumerate((k, v)):
            if not quantization:
                cache.values[blocks, part, :, offsets] = vectors
                continue
            numbers, scales = quantize(vectors, cache.values.dtype).split([vectors.shape[-1], 4], -1)
            cache.values.view(torch.int8)[blocks, part, :, offsets] = numbers
            cache.scales[blocks, part, :, offsets] = scales.contiguous().view(torch.float32)[..., 0]
        return None


def metadata_of(counts: list[int], lengths: list[int], tables: Tensor, padding: int = 0) -> AttentionMetadata:
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    rows = torch.cat((tables, torch.full((padding, tables.shape[1]), 10**6, dtype=torch.int32)))
    return AttentionMetadata(
        torch.tensor([*starts, *[starts[-1]] * padding], dtype=torch.int32),
        torch.tensor([*lengths, *[0] * padding], dtype=torch.int32),
        rows,
    )


def exact(a: Any, b: Any, dtype: Any, matmul: Any = np.matmul) -> Any:
    """Matrix product for the interpreter in float64: NumPy's order of summation depends on the row number."""
    return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)


def draw_split(monkeypatch: pytest.MonkeyPatch, rng: Random) -> None:
    """Set random numbers of programs and of work items per program."""
    count = rng.choice((1, 2, 3))
    monkeypatch.setattr(attention, "sm_count", lambda device: count)
    monkeypatch.setattr(attention, "ITEMS", rng.choice((1, 4, 1000)))
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", rng.choice((1, 64)) << 20)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(i, marks=pytest.mark.thorough) for i in range(6, 10))])
def test_attention_matches_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    draw_split(monkeypatch, rng)
    dtype, heads, group, dim = (
        rng.choice(DTYPES),
        rng.randint(1, 2),
        rng.choice((1, 2, 3, 5, 8, 70)),
        rng.choice((16, 80, 96, 512)),
    )
    lengths = [rng.choice((rng.randint(1, 100), rng.randint(200, 600))) for _ in range(rng.randint(1, 2))]
    counts = [rng.choice((1, min(rng.randint(1, 12), length))) for length in lengths]
    quantization, block_size, window = (
        rng.choice(KV_QUANTIZATIONS),
        16 * rng.randint(1, 8),
        rng.choice((0, 0, 1, 7, 40, 300)),
    )
    sequences, chosen = Sequences(rng, dtype, heads, dim, lengths), list(range(len(lengths)))
    state = rng.getstate()
    ours, tables = sequences.cache(kv_cache, quantization, block_size, chosen, 255)
    rng.setstate(state)
    theirs, same = sequences.cache(reference, quantization, block_size, chosen, 0)
    assert torch.equal(tables, same)
    q, metadata = randn(rng, sum(counts), heads * group, dim, dtype=dtype), metadata_of(counts, lengths, tables)
    sinks = rng.choice((None, randn(rng, heads * group) * rng.choice((1, 100))))
    options: dict[str, Any] = {
        "softcap": rng.choice((0.0, 0.0, 0.5, 30.0)),
        "sinks": sinks,
        "causal": rng.random() < 0.6,
    }
    options["chunked"] = options["causal"] and rng.random() < 0.4
    if options["causal"] and rng.random() < 0.5:
        options["alibi"] = torch.tensor([2.0 ** -rng.randint(0, 8) for _ in range(heads * group)])
    got = attention.attention(q, ours, metadata, AttentionOptions(dim**-0.5, window, **options))
    assert_close(got, reference.attention(q, theirs, metadata, AttentionOptions(dim**-0.5, window, **options)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.float32, ""),
        pytest.param(torch.float16, "", marks=pytest.mark.thorough),
        (torch.float32, "int8"),
        (torch.float16, "fp8"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_attention_does_not_depend_on_batch(
    dtype: torch.dtype, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query has the same bits with its previous queries or alone, with other sequences and padding, with or
    without a split of its sequence over programs, for any block size, and for any bytes in unused slots."""
    monkeypatch.setattr(np, "matmul", exact)
    rng = Random(f"{dtype} {quantization}")
    heads, group, dim, lengths = 1, 3, 16, [900, 300, 64, 5]
    sequences, queries = Sequences(rng, dtype, heads, dim, lengths), 24
    first = lengths[0] - queries
    q = randn(rng, queries, heads * group, dim, dtype=dtype)
    for window, causal, chunked in ((0, True, False), (270, True, False), (130, False, False), (270, True, True)):
        known: Tensor | None = None
        for _ in range(3):
            draw_split(monkeypatch, rng)
            chosen = [0, *rng.sample(range(1, len(lengths)), rng.randint(0, 3))]
            rng.shuffle(chosen)
            cache, tables = sequences.cache(
                kv_cache, quantization, 16 * rng.randint(1, 8), chosen, rng.choice((0, 126, 255))
            )
            begin = rng.choice((0, rng.randrange(queries), queries - 1)) if known is not None else 0
            end = rng.choice((queries, rng.randint(begin + 1, queries))) if known is not None and causal else queries
            counts = [end - begin if i == 0 else rng.choice((1, min(9, lengths[i]))) for i in chosen]
            totals = [first + end if i == 0 else lengths[i] for i in chosen]
            queries_of = [
                q[begin:end] if i == 0 else randn(rng, count, heads * group, dim, dtype=dtype)
                for i, count in zip(chosen, counts, strict=True)
            ]
            metadata = metadata_of(counts, totals, tables, rng.choice((0, 3)))
            out = attention.attention(
                torch.cat(queries_of), cache, metadata, AttentionOptions(0.2, window, causal=causal, chunked=chunked)
            )
            got = out.split(counts)[chosen.index(0)]
            if known is None:
                known = got
            assert torch.equal(got, known[begin:end])
        assert known is not None


def test_different_summation_order_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(0)
    sequences = Sequences(rng, torch.float32, 1, 16, [300])
    cache, tables = sequences.cache(kv_cache, "", 16, [0], 0)
    q = randn(rng, 1, 2, 16)
    monkeypatch.setattr(attention, "sm_count", lambda device: 1)
    before = attention.attention(q, cache, metadata_of([1], [300], tables), AttentionOptions(0.2))
    monkeypatch.setattr(attention, "SPLIT", 128)
    after = attention.attention(q, cache, metadata_of([1], [300], tables), AttentionOptions(0.2))
    assert_close(after, before)
    assert not torch.equal(after, before)


def test_layers_share_attention_plan() -> None:
    rng = Random(0)
    sequences = Sequences(rng, torch.float32, 1, 16, [40])
    cache, tables = sequences.cache(kv_cache, "", 16, [0], 0)
    q, metadata, whole = randn(rng, 3, 2, 16), metadata_of([3], [40], tables), torch.ones(3, 40)
    out = whole[:, 4:36]
    assert attention.attention(q, cache, metadata, AttentionOptions(0.2), out) is out
    assert whole[:, :4].eq(1).all() and whole[:, 36:].eq(1).all()
    metadata.seq_lens.fill_(10**6)  # has no effect on the plan, which was made before
    [plan] = metadata.plan.values()
    before = plan.tensor.clone()
    metadata.seq_lens.fill_(40)
    assert torch.equal(attention.attention(q, cache, metadata, AttentionOptions(0.2)), out)
    assert torch.equal(plan.tensor, before) and len(metadata.plan) == 1
    attention.attention(q, cache, metadata, AttentionOptions(0.2, 8))
    assert len(metadata.plan) == 2


@pytest.mark.parametrize("seed", FEW)
def test_kv_cache_export_and_import_match_reference(seed: int) -> None:
    """The bytes in a transfer buffer equal the reference's, imported values are exported again unchanged, and blocks
    are copied completely."""
    rng = Random(seed)
    dtype, quantization, slot_tokens, heads = (
        rng.choice(DTYPES),
        rng.choice(("", "int8")),
        rng.choice((16, 48)),
        rng.randint(1, 3),
    )
    dim, block_size, blocks, tokens = rng.choice((16, 80, 128)), 16 * rng.randint(1, 8), 4, rng.randint(1, 8)
    spec, other = KVSpec(heads, dim, NAMES[dtype], block_size, quantization), KVSpec(3, 32, "float16", block_size)
    layout = transfer_layouts([other, replace(spec, kv_heads=heads + 2), other], slot_tokens)[1]
    layout = replace(layout, first_head=rng.randint(0, 2))
    caches = kv_cache.new_kv_cache([other, spec], blocks, CPU)
    ours, theirs = caches[1], reference.new_kv_cache([spec], blocks, CPU)[0]
    k, v = (randn(rng, tokens, heads, dim, dtype=dtype) for _ in "kv")
    slots = torch.tensor(rng.sample(range(blocks * block_size), tokens))
    places = torch.tensor(rng.sample(range(2 * slot_tokens), tokens))
    places[rng.randrange(tokens)] = -1
    buffers = []
    for module, cache in ((kv_cache, ours), (reference, theirs)):
        module.store_kv(cache, k, v, slots)
        buffer, progress = torch.full((2 * layout.slot_bytes + 3,), 99, dtype=torch.uint8), torch.tensor([7])
        module.export_kv(cache, slots, buffer, places, layout, progress)
        assert progress.item() == (8 if tokens > 1 else 7)
        buffers.append(buffer)
    assert torch.equal(*buffers)

    again = kv_cache.new_kv_cache([other, spec], blocks, CPU)
    again[1].pool.fill_(5)
    kv_cache.import_kv(again[1], slots, buffers[0], places, layout)
    read = torch.full_like(buffers[0], 99)
    kv_cache.export_kv(again[1], slots, read, places, layout)
    assert torch.equal(read, buffers[0])

    free = torch.tensor([slot for slot in range(blocks * block_size) if slot not in slots][:tokens])
    kv_cache.copy_slots(again[1], slots, free)
    kv_cache.export_kv(again[1], free, read.fill_(99), places, layout)
    assert torch.equal(read, buffers[0])

    again[1].pool.fill_(5)
    kv_cache.copy_blocks(caches, again, [(0, 2), (1, 3), (3, 0)])
    assert torch.equal(again[0].pool[[2, 3, 0]], caches[0].pool[[0, 1, 3]]) and again[0].pool[1].eq(5).all()
    assert torch.equal(again[1].values[[2, 3, 0]].view(torch.int8), ours.values[[0, 1, 3]].view(torch.int8))


@pytest.mark.parametrize("quantization", KV_QUANTIZATIONS)
def test_gathered_keys_and_values_match_reference(quantization: str) -> None:
    rng = Random(0)
    spec, tokens, blocks = (
        KVSpec(3, 32, "bfloat16", 16, quantization),
        40,
        torch.tensor([4, 0, 2, 0], dtype=torch.int32),
    )
    slots = (blocks[:3, None] * 16 + torch.arange(16)).flatten()[:tokens].long()
    k, v = (randn(rng, tokens, 3, 32, dtype=torch.bfloat16) for _ in "kv")
    (ours,), (theirs,) = (module.new_kv_cache([spec], 5, CPU) for module in (kv_cache, reference))
    kv_cache.store_kv(ours, k, v, slots)
    layout, places = transfer_layouts([spec], 48)[0], torch.arange(tokens)
    buffer = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    kv_cache.export_kv(ours, slots, buffer, places, layout)
    reference.import_kv(theirs, slots, buffer, places, layout)
    for length in (tokens, 32, 1):
        found, expected = kv_cache.gather_kv(ours, blocks, length), reference.gather_kv(theirs, blocks, length)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        if not quantization:
            assert torch.equal(found[0], k[:length]) and torch.equal(found[1], v[:length])


def test_export_uses_only_the_transfer_buffer_in_host_memory() -> None:
    """A GPU can read only the page-locked transfer buffer in host memory; the device ``meta`` represents the GPU."""
    spec = KVSpec(2, 64, "bfloat16", 16)
    cache, layout = kv_cache.new_kv_cache([spec], 2, torch.device("meta"))[0], transfer_layouts([spec], 16)[0]
    buffer, slots = torch.zeros(layout.slot_bytes, dtype=torch.uint8), torch.arange(3)
    with record_launches() as launches:
        kv_cache.export_kv(cache, slots.to("meta"), buffer, slots, layout)
    (tensors,) = [[each for each in launch.args if isinstance(each, torch.Tensor)] for launch in launches]
    assert [each.device.type for each in tensors] == ["meta", "meta", "cpu", "meta"]


def test_unsupported_kv_cache_shapes_are_refused() -> None:
    for spec, message in (
        (KVSpec(1, 64, "float16", 20), "multiple of 16"),
        (KVSpec(1, 72, "float16", 16), "head_dim 72"),
        (KVSpec(1, 592, "float16", 16, latent=528), "latent sizes up to 512"),
    ):
        with pytest.raises(PenstockError, match=message):
            kv_cache.new_kv_cache([spec], 1, CPU)
