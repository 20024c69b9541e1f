"""Sparse attention of the CUDA backend in Triton's interpreter: equal to the reference ops, with the same bits in any
batch."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from test_cuda_attention import CPU, DTYPES, NAMES, assert_close, draw_split, exact, metadata_of, randn
from test_cuda_latent import Sequences

from penstock.checkpoint.kv_spec import transfer_layouts
from penstock.ops import KVSpec, reference
from penstock.ops.cuda import kv_cache, latent


@pytest.mark.parametrize("seed", range(4))
def test_index_keys_are_stored_after_latent_vectors(seed: int) -> None:
    """Exported bytes equal the reference's. Padding writes nothing."""
    rng = Random(seed)
    dtype, rope, index_dim, tokens, blocks = rng.choice(DTYPES), 16, rng.choice((16, 48)), 5, 3
    spec = KVSpec(1, 32 + rope + index_dim, NAMES[dtype], 16, latent=32, index_dim=index_dim)
    q, k = randn(rng, tokens, 3, rope, dtype=dtype), randn(rng, tokens, rope, dtype=dtype)
    vectors, index_keys = randn(rng, tokens, 32, dtype=dtype), randn(rng, tokens, index_dim + 3, dtype=dtype)[:, 3:]
    table, slots = torch.cat((torch.ones(8), torch.zeros(8)))[None], torch.tensor(rng.sample(range(48), tokens))
    positions, (layout,) = torch.zeros(tokens, dtype=torch.int64), transfer_layouts([spec], 16)
    buffers = []
    for ops, module in ((latent, kv_cache), (reference, reference)):
        cache, out = module.new_kv_cache([spec], blocks, CPU)[0], torch.empty_like(q)
        ops.latent_rope_and_store(q, k, vectors, positions, table, cache, slots, True, out, index_keys)
        buffers.append(torch.zeros(layout.slot_bytes, dtype=torch.uint8))
        module.export_kv(cache, slots, buffers[-1], torch.arange(tokens), layout)
        if module is kv_cache:
            before, padding = cache.pool.clone(), torch.full_like(slots, -1)
            ops.latent_rope_and_store(q, k, vectors, padding, table, cache, padding, True, out, index_keys)
            assert torch.equal(cache.pool, before)
    assert torch.equal(*buffers)


@pytest.mark.parametrize("seed", range(6))
def test_selection_and_sparse_attention_match_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index keys are few different integers, so that scores are exact and often equal. Groups of queries are small."""
    rng = Random(seed)
    draw_split(monkeypatch, rng)
    monkeypatch.setattr(latent, "SCORE_BYTES", rng.choice((4, 4096, 1 << 20)))
    monkeypatch.setattr(latent, "SELECT_BLOCK", rng.choice((64, 2048)))
    dtype, heads, index_heads = rng.choice(DTYPES), rng.choice((1, 5, 40)), rng.choice((1, 2, 5, 32))
    size, index_dim, top_k = rng.choice((16, 48)), rng.choice((16, 48)), rng.choice((1, 8, 33, 100, 700))
    spec = KVSpec(1, size + 16 + index_dim, NAMES[dtype], 16, latent=size, index_dim=index_dim)
    lengths = [rng.choice((rng.randint(1, 100), rng.randint(200, 600))) for _ in range(rng.randint(1, 3))]
    counts = [rng.choice((1, min(rng.randint(1, 6), length))) for length in lengths]
    sequences = Sequences(rng, spec, lengths)
    for vectors in sequences.vectors:
        vectors[:, -index_dim:] = torch.randint(-1, 2, (len(vectors), index_dim))
    ours, theirs, tables = sequences.cache(16 * rng.randint(1, 8), list(range(len(lengths))), 255)
    tokens, padding = sum(counts), rng.choice((0, 2))  # as in a CUDA graph: padding of sequences and tokens
    metadata, plain = metadata_of(counts, lengths, tables, padding), metadata_of(counts, lengths, tables)
    index_q = torch.randint(-2, 3, (tokens + padding, index_heads, index_dim)).to(dtype)
    weights = torch.randint(-3, 4, (tokens + padding, index_heads)).float()
    q = randn(rng, tokens + padding, heads, size + 16, dtype=dtype)
    for _ in range(2):  # layers of a step share the plan
        got = latent.select_keys(index_q, weights, ours, metadata, top_k, 0.5)
    expected = reference.select_keys(index_q[:tokens], weights[:tokens], theirs, plain, top_k, 0.5)
    assert got.seq_lens.tolist() == [*expected.seq_lens.tolist(), *[0] * padding]
    assert got.query_start_loc.tolist() == [*range(tokens), *[tokens] * (1 + padding)]
    used = torch.arange(top_k) < expected.seq_lens[:, None]
    assert torch.equal(got.block_tables[:tokens][used], expected.block_tables[used])
    attended = latent.latent_attention(q, ours, got, 0.2, size, selected=True)[:tokens]
    assert_close(
        attended, reference.latent_attention(q[:tokens], theirs, expected, 0.2, size, selected=True).contiguous()
    )


@pytest.mark.filterwarnings("ignore:overflow")
def test_sparse_attention_does_not_depend_on_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query has the same bits alone, with other queries, sequences and padding. If all positions are selected, the
    bits are those of dense attention."""
    monkeypatch.setattr(np, "matmul", exact)
    rng, dtype, heads, lengths, queries = Random(0), torch.float16, 3, [600, 300, 5], 4
    spec = KVSpec(1, 64, NAMES[dtype], 16, latent=16, index_dim=32)
    sequences, first = Sequences(rng, spec, lengths), lengths[0] - queries
    q, index_q = randn(rng, queries, heads, 32, dtype=dtype), randn(rng, queries, 2, 32, dtype=dtype)
    weights = randn(rng, queries, 2)
    for top_k in (50, 600):
        known = None
        for _ in range(3):
            draw_split(monkeypatch, rng)
            chosen = [0, *rng.sample(range(1, len(lengths)), rng.randint(0, 2))]
            rng.shuffle(chosen)
            cache, _, tables = sequences.cache(16 * rng.randint(1, 8), chosen, rng.choice((0, 126, 255)))
            begin = rng.randrange(queries) if known is not None else 0
            end = rng.randint(begin + 1, queries) if known is not None else queries
            counts = [end - begin if i == 0 else 1 for i in chosen]
            totals = [first + end if i == 0 else lengths[i] for i in chosen]

            parts = slice(begin, end)

            def gathered(each: torch.Tensor, parts: slice = parts, chosen: list[int] = chosen) -> torch.Tensor:
                others = (each[parts] if i == 0 else randn(rng, *each[:1].shape, dtype=each.dtype) for i in chosen)
                return torch.cat(list(others))

            metadata = metadata_of(counts, totals, tables, rng.choice((0, 3)))
            selected = latent.select_keys(gathered(index_q), gathered(weights), cache, metadata, top_k, 0.2)
            out = latent.latent_attention(gathered(q), cache, selected, 0.2, spec.latent, selected=True)
            got = out.split(counts)[chosen.index(0)]
            known = got if known is None else known
            assert torch.equal(got, known[begin:end])
        if top_k == 600:
            plain = Sequences(rng, replace(spec, head_dim=32, index_dim=0), lengths)
            plain.vectors = [vectors[:, :32] for vectors in sequences.vectors]
            cache, _, tables = plain.cache(16, [0], 0)
            assert torch.equal(
                latent.latent_attention(q, cache, metadata_of([queries], lengths[:1], tables), 0.2, 16), known
            )
