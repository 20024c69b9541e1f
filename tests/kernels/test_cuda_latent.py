"""Latent attention of the CUDA backend in Triton's interpreter: equal to the reference ops, with the same bits in any
batch."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from test_cuda_attention import CPU, DTYPES, FEW, NAMES, assert_close, draw_split, exact, metadata_of, randn

from penstock.checkpoint.kv_spec import transfer_layouts
from penstock.ops import KVSpec, reference
from penstock.ops.cuda import kv_cache, latent
from penstock.ops.reference.kv_cache import store_vectors


def draw(rng: Random, dtype: torch.dtype, quantization: str) -> tuple[KVSpec, int]:
    """Random specification of a latent cache, and the size of its rotary part."""
    size, rope = rng.choice(((16, 16), (48, 32), (64, 16)))
    return KVSpec(1, size + rope, NAMES[dtype], 16 * rng.randint(1, 5), quantization, latent=size), rope


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_latent_rope_and_store_match_reference(quantization: str, seed: int) -> None:
    """Queries and exported bytes equal the reference's. Padding writes nothing."""
    rng = Random(seed)
    dtype, heads, tokens, blocks = rng.choice(DTYPES), rng.randint(1, 20), rng.randint(2, 5), 3
    spec, rope = draw(rng, dtype, quantization)
    q, k = randn(rng, tokens, heads, rope + 9, dtype=dtype)[..., 9:], randn(rng, tokens, rope + 3, dtype=dtype)[:, 3:]
    vectors, table = randn(rng, tokens, spec.latent, dtype=dtype), randn(rng, 50, rope)
    positions, slots = torch.randint(50, (tokens,)), torch.tensor(rng.sample(range(blocks * spec.block_size), tokens))
    pairs, places = rng.random() < 0.5, torch.arange(tokens)
    layout = transfer_layouts([KVSpec(2, 32, "float32"), spec], 16)[1]
    results = []
    for ops, module in ((latent, kv_cache), (reference, reference)):
        cache = module.new_kv_cache([KVSpec(2, 32, "float32", spec.block_size), spec], blocks, CPU)[1]
        out = torch.full((tokens, heads, rope + 5), 3, dtype=dtype)
        ops.latent_rope_and_store(q, k, vectors, positions, table, cache, slots, pairs, out[..., 5:])
        assert out[..., :5].eq(3).all()
        buffer = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
        module.export_kv(cache, slots, buffer, places, layout)
        again = module.new_kv_cache([KVSpec(2, 32, "float32", spec.block_size), spec], blocks, CPU)[1]
        module.import_kv(again, slots, buffer, places, layout)
        read = torch.zeros_like(buffer)
        module.export_kv(again, slots, read, places, layout)
        assert torch.equal(read, buffer)
        if module is kv_cache:
            before = cache.pool.clone()
            padding = torch.full_like(slots, -1)
            latent.latent_rope_and_store(q, k, vectors, padding, table, cache, padding, pairs, out[..., 5:].clone())
            assert torch.equal(cache.pool, before)
        results.append((out, buffer))
    assert_close(results[0][0], results[1][0])
    ours, theirs = (
        buffer[layout.offset :].view(torch.int8 if quantization else dtype).float() for _, buffer in results
    )
    assert (ours - theirs).abs().max() <= 1 if quantization else torch.allclose(ours, theirs, atol=4e-3)


@pytest.mark.parametrize("seed", FEW)
def test_linear_by_head_matches_reference(seed: int) -> None:
    rng = Random(seed)
    dtype, tokens, heads = rng.choice(DTYPES), rng.randint(1, 70), rng.randint(1, 3)
    inputs, outputs = rng.randint(1, 100), rng.randint(1, 100)
    x, weight = (
        randn(rng, tokens, heads, inputs + 4, dtype=dtype)[..., 2:-2],
        randn(rng, heads, outputs, inputs, dtype=dtype),
    )
    whole = torch.ones(tokens, heads, outputs + 3, dtype=dtype)
    got = latent.linear_by_head(x, latent.pack_by_head(weight), whole[..., 1:-2])
    scale = inputs**-0.5
    assert_close(got * scale, reference.linear_by_head(x, weight) * scale)
    assert whole[..., :1].eq(1).all() and whole[..., -2:].eq(1).all()


class Sequences:
    """Sequences with random latent vectors."""

    def __init__(self, rng: Random, spec: KVSpec, lengths: list[int]) -> None:
        dtype = getattr(torch, spec.dtype)
        self.rng, self.spec = rng, spec
        self.vectors = [randn(rng, length, spec.head_dim, dtype=dtype) for length in lengths]

    def cache(self, block_size: int, chosen: list[int], garbage: int) -> tuple[Any, Any, Tensor]:
        """Caches of the kernels and of the reference with the chosen sequences, and the block tables."""
        spec = replace(self.spec, block_size=block_size)
        needed = [-(-len(self.vectors[i]) // block_size) for i in chosen]
        free = self.rng.sample(range(1, sum(needed) + 3), sum(needed))
        tables = torch.zeros((len(chosen), max(needed)), dtype=torch.int32)
        ours, theirs = (module.new_kv_cache([spec], sum(needed) + 3, CPU)[0] for module in (kv_cache, reference))
        ours.pool.fill_(garbage)
        for i, (number, blocks) in enumerate(zip(chosen, needed, strict=True)):
            tables[i, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
            at = torch.arange(len(self.vectors[number]))
            block, offset = tables[i].long()[at // block_size], at % block_size
            store_vectors(theirs.flatten(1, 2)[0], self.vectors[number][:, None], block * block_size + offset)
            if spec.quantization:
                numbers, scales = theirs[0, block, offset, 0].view(torch.int8).split([spec.head_dim, 4], -1)
                ours.values.view(torch.int8)[block, 0, 0, offset] = numbers
                ours.scales[block, 0, 0, offset] = scales.contiguous().view(torch.float32)[..., 0]
            else:
                ours.values[block, 0, 0, offset] = self.vectors[number]
        return ours, theirs, tables


@pytest.mark.parametrize("seed", range(6))
def test_latent_attention_matches_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    draw_split(monkeypatch, rng)
    dtype, heads, quantization = rng.choice(DTYPES), rng.choice((1, 2, 5, 16, 40)), rng.choice(("", "int8", "fp8"))
    spec, _ = draw(rng, dtype, quantization)
    lengths = [rng.choice((rng.randint(1, 100), rng.randint(200, 600))) for _ in range(rng.randint(1, 2))]
    counts = [rng.choice((1, min(rng.randint(1, 6), length))) for length in lengths]
    ours, theirs, tables = Sequences(rng, spec, lengths).cache(16 * rng.randint(1, 8), list(range(len(lengths))), 255)
    q, metadata = randn(rng, sum(counts), heads, spec.head_dim, dtype=dtype), metadata_of(counts, lengths, tables)
    scale = spec.head_dim**-0.5
    got = latent.latent_attention(q, ours, metadata, scale, spec.latent)
    assert_close(got, reference.latent_attention(q, theirs, metadata, scale, spec.latent).contiguous())


@pytest.mark.parametrize(("dtype", "quantization"), [(torch.float16, ""), (torch.float32, "int8")])
@pytest.mark.filterwarnings("ignore:overflow")
def test_latent_attention_does_not_depend_on_batch(
    dtype: torch.dtype, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query has the same bits alone, with other queries, sequences and padding, and split over programs."""
    monkeypatch.setattr(np, "matmul", exact)
    rng = Random(f"{dtype} {quantization}")
    heads, lengths, queries = 3, [600, 300, 5], 12
    spec = KVSpec(1, 32, NAMES[dtype], 16, quantization, latent=16)
    sequences, first = Sequences(rng, spec, lengths), lengths[0] - queries
    q = randn(rng, queries, heads, 32, dtype=dtype)
    known: Tensor | None = None
    for _ in range(4):
        draw_split(monkeypatch, rng)
        chosen = [0, *rng.sample(range(1, len(lengths)), rng.randint(0, 2))]
        rng.shuffle(chosen)
        cache, _, tables = sequences.cache(16 * rng.randint(1, 8), chosen, rng.choice((0, 126, 255)))
        begin = rng.randrange(queries) if known is not None else 0
        end = rng.randint(begin + 1, queries) if known is not None else queries
        counts = [end - begin if i == 0 else rng.choice((1, min(9, lengths[i]))) for i in chosen]
        totals = [first + end if i == 0 else lengths[i] for i in chosen]
        queries_of = [
            q[begin:end] if i == 0 else randn(rng, count, heads, 32, dtype=dtype)
            for i, count in zip(chosen, counts, strict=True)
        ]
        metadata = metadata_of(counts, totals, tables, rng.choice((0, 3)))
        out = latent.latent_attention(torch.cat(queries_of), cache, metadata, 0.2, spec.latent)
        got = out.split(counts)[chosen.index(0)]
        known = got if known is None else known
        assert torch.equal(got, known[begin:end])
