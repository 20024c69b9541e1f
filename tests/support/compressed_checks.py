"""Checks of the ops of compressed attention and hyper-connections (DeepSeek-V4): equal to the reference ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from test_ops import draw_batch, randn
from test_sparse_attention import slots_of
from torch import Tensor

from penstock.ops import AttentionMetadata, Batch, KVSpec, StateBatch, reference
from penstock.ops.compressed import Compression

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Backend:
    """Ops to check, and how."""

    ops: Any
    dtypes: Sequence[torch.dtype]
    dims: Sequence[int]
    """Sizes of entries."""
    rates: Sequence[int]
    vectors: Callable[[Any], Tensor]
    """Vectors of a cache, ``[slots, head_dim]``."""
    assert_close: Callable[[Tensor, Tensor], None]


def check_entries_and_attention(backend: Backend, seed: int) -> None:
    """Computes random batches of random sequences twice: at once, and in two steps, of which the second may accept
    drafts of the first. Entries have the same bits."""
    rng = Random(seed)
    dtype, dim, rope = rng.choice(backend.dtypes), rng.choice(backend.dims), 16
    index_dim, rate, window = rng.choice((0, 16, 128)), rng.choice(backend.rates), rng.choice((1, 7, 40))
    overlap, heads, block_size = index_dim > 0, rng.randint(1, 40), 16 * rng.randint(1, 5)
    spec = KVSpec(
        1, 2 * dim + index_dim, str(dtype).removeprefix("torch."), block_size, latent=dim, index_dim=dim + index_dim
    )
    batch, tokens, blocks = draw_batch(rng, block_size, rng.randint(1, 3))
    lengths = batch.attention.seq_lens.tolist()
    table = randn(seed, max(lengths), rope)
    parts = [(dim, dim)] + [(index_dim, 2 * dim)] * overlap
    sizes = [
        Compression(size, rate, overlap, offset, 1e-6, f"part{i}", f"part{i}_in")
        for i, (size, offset) in enumerate(parts)
    ]
    weights = [(randn(i, rate, each.channels), randn(i + 9, each.dim)) for i, each in enumerate(sizes)]
    inputs = [randn(seed + i, sum(lengths), 2 * each.channels, dtype=dtype) for i, each in enumerate(sizes)]
    keys = randn(seed, sum(lengths), dim, dtype=dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    drafts = 2

    def caches(ops: Any) -> tuple[Any, dict[str, Tensor]]:
        cache = ops.new_kv_cache([spec], blocks, CPU)[0]
        slots = 2 * len(lengths)
        states = {each.state: torch.zeros(slots, each.span, 2 * each.channels, dtype=dtype) for each in sizes}
        states |= {each.inputs: torch.zeros(slots, drafts, 2 * each.channels, dtype=dtype) for each in sizes}
        return cache, states

    def step(
        ops: Any, cache: Any, states: dict[str, Tensor], first: list[int], end: list[int], accepted: int, kept: int
    ) -> None:
        """Compute tokens from ``first`` to ``end`` of each sequence, the last ``kept`` of which are drafts. There is a
        snapshot after half of the other tokens."""
        count = len(lengths)
        at = [torch.arange(a, b) for a, b in zip(first, end, strict=True)]
        slots = torch.cat(
            [slots_of(batch.attention.block_tables[i], lengths[i], block_size)[each] for i, each in enumerate(at)]
        )
        loc = torch.tensor([0, *map(len, at)]).cumsum(0).int()

        def ints(value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32)

        after = torch.tensor([(len(each) - kept) // 2 for each in at]).int()
        metadata = AttentionMetadata(loc, torch.tensor(end).int(), batch.attention.block_tables)
        given = StateBatch(
            [states],
            torch.arange(count).int(),
            ints(accepted),
            ints(kept),
            torch.arange(count + 1).int(),
            after,
            torch.arange(count, 2 * count).int(),
        )
        now = Batch(slots, torch.cat(at), slots, metadata, slots, metadata, states=given)
        for each, (bias, norm), x in zip(sizes, weights, inputs, strict=True):
            rows = torch.cat(
                [x[starts[i] + a : starts[i] + b] for i, (a, b) in enumerate(zip(first, end, strict=True))]
            )
            ops.compress(rows, each, bias, norm, table, cache, states, now)
        own = torch.cat([keys[starts[i] + a : starts[i] + b] for i, (a, b) in enumerate(zip(first, end, strict=True))])
        identity = torch.cat((torch.ones(rope // 2), torch.zeros(rope // 2)))[None]
        zero = torch.zeros(len(own), dtype=torch.int64)
        q = own.new_zeros(len(own), 1, rope)
        ops.latent_rope_and_store(
            q, own[:, -rope:], own[:, :-rope], zero, identity, cache, slots, True, torch.empty_like(q)
        )

    ours, theirs, parted = (caches(ops) for ops in (backend.ops, reference, backend.ops))
    zeros = [0] * len(lengths)
    step(backend.ops, *ours, zeros, lengths, 0, 0)
    step(reference, *theirs, zeros, lengths, 0, 0)
    for each in sizes:
        assert torch.equal(ours[1][each.state], theirs[1][each.state])
    middle = [max(length // 2, min(length, 1)) for length in lengths]
    kept = min(drafts, min(middle))
    accepted = rng.randint(0, kept)
    step(backend.ops, *parted, zeros, middle, 0, kept)
    again = [each - kept + accepted for each in middle]
    if all(a < b for a, b in zip(again, lengths, strict=True)):
        step(backend.ops, *parted, again, lengths, accepted, 0)
        used = torch.cat(
            [slots_of(batch.attention.block_tables[i], length, block_size) for i, length in enumerate(lengths)]
        )
        whole, other = (backend.vectors(each[0])[used] for each in (ours, parted))
        assert torch.equal(whole, other)
        for each in sizes:
            assert torch.equal(*(states[each.state][: len(lengths)] for _, states in (ours, parted)))
    top_k = rng.choice((1, 5, 100)) if overlap else max(max(lengths) // rate, 1)
    q = randn(seed + 5, tokens, heads, dim, dtype=dtype)
    index = ()
    if overlap:  # scores are sums of products with entries, which differ in the last bits: all entries are selected
        top_k = max(max(lengths) // rate, 1)
        index = randn(seed, tokens, 3, index_dim, dtype=dtype), randn(seed, tokens, 3), 0.5
    selections = [
        ops.select_entries(cache, batch.attention, tokens, window, rate, top_k, *index)
        for ops, (cache, _) in ((backend.ops, ours), (reference, theirs))
    ]
    assert torch.equal(selections[0].seq_lens, selections[1].seq_lens)
    used = torch.arange(window + top_k) < selections[0].seq_lens[:, None]
    assert torch.equal(selections[0].block_tables[used], selections[1].block_tables[used])
    sinks, scale = randn(seed, heads), dim**-0.5
    attended, expected = (
        ops.compressed_attention(q, cache, selection, scale, sinks)
        for ops, (cache, _), selection in zip((backend.ops, reference), (ours, theirs), selections, strict=True)
    )
    backend.assert_close(attended, expected)


def check_selection_of_entries(backend: Backend, seed: int) -> None:
    """Entries of few different integers have exact and often equal scores."""
    rng = Random(seed)
    dtype, dim, rate, window = rng.choice(backend.dtypes), 16, rng.choice((1, 3, 4)), rng.choice((1, 7, 40))
    index_dim, heads, top_k = rng.choice((16, 48, 128)), rng.choice((1, 2, 5, 32)), rng.choice((1, 8, 33))
    block_size = 16 * rng.randint(1, 5)
    spec = KVSpec(
        1, 2 * dim + index_dim, str(dtype).removeprefix("torch."), block_size, latent=dim, index_dim=dim + index_dim
    )
    batch, tokens, blocks = draw_batch(rng, block_size, rng.randint(1, 3))
    ours, theirs = (ops.new_kv_cache([spec], blocks, CPU)[0] for ops in (backend.ops, reference))
    vectors = torch.randint(-1, 2, (blocks * block_size, spec.head_dim)).to(dtype)
    backend.vectors(ours).copy_(vectors)
    theirs.view(-1, spec.head_dim).copy_(vectors)
    q = torch.randint(-2, 3, (tokens, heads, index_dim)).to(dtype)
    weights = torch.randint(-3, 4, (tokens, heads)).float()
    got, expected = (
        ops.select_entries(cache, batch.attention, tokens, window, rate, top_k, q, weights, 0.5)
        for ops, cache in ((backend.ops, ours), (reference, theirs))
    )
    assert torch.equal(got.seq_lens, expected.seq_lens)
    used = torch.arange(window + top_k) < got.seq_lens[:, None]
    assert torch.equal(got.block_tables[used], expected.block_tables[used])


def check_hyper_connections(backend: Backend, seed: int) -> None:
    rng = Random(seed)
    dtype, streams, rows, size = (
        rng.choice(backend.dtypes),
        rng.randint(1, 8),
        rng.randint(1, 5),
        rng.choice((1, 16, 37, 100)),
    )
    for width, kinds in ((streams, 1), ((2 + streams) * streams, 3)):
        logits, base, scale = randn(seed, rows, width), randn(seed + 1, width), randn(seed + 2, kinds)
        iterations = rng.choice((1, 2, 20))
        got, expected = (
            ops.hyper_weights(logits, base, scale, streams, iterations, 1e-6) for ops in (backend.ops, reference)
        )
        backend.assert_close(got, expected)
    x, residual = randn(seed, rows, size, dtype=dtype), randn(seed + 3, rows, streams * size, dtype=dtype)
    collapsed = [ops.collapse_streams(residual, got, streams) for ops in (backend.ops, reference)]
    backend.assert_close(*collapsed)
    mixed = [ops.mix_streams(x, residual.clone(), got, streams) for ops in (backend.ops, reference)]
    backend.assert_close(*mixed)


def check_rotation_of_tails(backend: Backend, seed: int) -> None:
    rng = Random(seed)
    dtype, tokens, heads, dim = (
        rng.choice(backend.dtypes),
        rng.randint(1, 5),
        rng.randint(1, 5),
        rng.choice(backend.dims),
    )
    rotary = rng.choice((2, 10, 16))
    x, table, positions = (
        randn(seed, tokens, heads, dim, dtype=dtype),
        randn(seed, 9, rotary),
        torch.randint(0, 9, (tokens,)),
    )
    for inverse in (False, True):
        got, expected = x.clone(), x.clone()
        backend.ops.rotate_tail(got, positions, table, inverse)
        reference.rotate_tail(expected, positions, table, inverse)
        backend.assert_close(got, expected)
