"""CPU kernels with recurrent state, of every instruction set: equal to the reference ops, and with the same bits for
any division of the tokens into steps, batches, drafts and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from test_ops import TOLERANCE, few, kernels, randn, seeds
from torch import Tensor

from penstock.checkpoint.state_config import (
    GatedDeltaNetConfig,
    KimiDeltaConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    RGLRUConfig,
)
from penstock.checkpoint.state_spec import StateSpec
from penstock.ops import (
    AttentionMetadata,
    Batch,
    DeltaSizes,
    ScanWeights,
    StateBatch,
    StateSpaceSizes,
    cpu,
    reference,
)
from penstock.ops.activations import ACTIVATIONS

MAX_DRAFTS = 3
ROWS = 4
Inputs = tuple[Tensor, ...]
"""Inputs of an op, ``[tokens, ...]`` each."""


@pytest.fixture(params=kernels.available(), autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.current()
    kernels.use(request.param)
    cpu.set_threads(2)
    yield
    kernels.use(before)


class Op(NamedTuple):
    """An op with state, and the sizes of a layer."""

    spec: StateSpec
    inputs: Callable[[int, int], Inputs]
    """Function from a seed and the number of tokens to inputs."""
    call: Callable[[Any, Inputs, dict[str, Tensor], Batch], Tensor]
    """Function from a backend, inputs, states and a batch to the outputs."""


def convolution(rng: Random, dtype: torch.dtype) -> Op:
    heads, dim, kernel = rng.randint(1, 4), rng.choice((4, 16, 40, 100)), rng.randint(2, 5)
    config = GatedDeltaNetConfig(heads, heads, dim, dim, kernel)
    channels = 3 * heads * dim
    spec = config.spec(str(dtype).removeprefix("torch."))
    weight = randn(rng.randrange(1000), kernel, channels)
    bias, silu = rng.choice((None, randn(5, channels))), rng.random() < 0.5

    def inputs(seed: int, tokens: int) -> Inputs:
        return (randn(seed, tokens, channels, dtype=dtype),)

    def call(ops: Any, given: Inputs, cache: dict[str, Tensor], batch: Batch) -> Tensor:
        result: Tensor = ops.short_convolution(given[0], weight, bias, silu, cache, batch)
        return result

    return Op(spec, inputs, call)


def delta_rule(rng: Random, dtype: torch.dtype, by_channel: bool = False) -> Op:
    keys, name = rng.randint(1, 3), str(dtype).removeprefix("torch.")
    sizes = DeltaSizes(keys, keys * rng.randint(1, 3), rng.choice((8, 16, 24, 128)), rng.choice((8, 16, 72, 128)))
    config = GatedDeltaNetConfig(sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, 4)
    spec = config.spec(name)
    if by_channel:
        sizes = replace(sizes, value_heads=keys, value_dim=sizes.key_dim, decay_dim=sizes.key_dim)
        spec = KimiDeltaConfig(keys, sizes.key_dim, 4).spec(name)
    log_decay, bias = randn(1, sizes.value_heads), randn(2, sizes.value_heads * sizes.decay_dim)

    def inputs(seed: int, tokens: int) -> Inputs:
        qkv, gates = (spec.inputs[name].shape[0] for name in ("qkv", "gates"))
        return randn(seed, tokens, qkv, dtype=dtype), randn(seed + 1, tokens, gates, dtype=dtype)

    def call(ops: Any, given: Inputs, cache: dict[str, Tensor], batch: Batch) -> Tensor:
        result: Tensor = ops.gated_delta_rule(*given, log_decay, bias, sizes, cache, batch)
        return result

    return Op(spec, inputs, call)


def selective_scan(rng: Random, dtype: torch.dtype) -> Op:
    channels, size = rng.choice((5, 16, 64, 100, 200)), rng.choice((1, 4, 16, 21))
    spec = MambaConfig(channels, size, 1, 4).spec(str(dtype).removeprefix("torch."))
    weights = ScanWeights(-randn(1, size, channels).exp(), randn(2, channels), randn(3, channels))

    def inputs(seed: int, tokens: int) -> Inputs:
        parts = randn(seed, tokens, 3 * channels + 2 * size, dtype=dtype)
        return tuple(parts.split([channels, channels, size, size, channels], -1))

    def call(ops: Any, given: Inputs, cache: dict[str, Tensor], batch: Batch) -> Tensor:
        result: Tensor = ops.selective_scan(*given, weights, cache, batch)
        return result

    return Op(spec, inputs, call)


def rg_lru(rng: Random, dtype: torch.dtype) -> Op:
    heads, width = rng.randint(1, 3), rng.choice((5, 16, 40))
    spec = RGLRUConfig(heads, width, 4).spec(str(dtype).removeprefix("torch."))
    rates, bias = -8 * randn(1, heads, width).exp(), randn(2, heads, 2 * width)

    def inputs(seed: int, tokens: int) -> Inputs:
        x, gates = randn(seed, tokens, heads * width, dtype=dtype), randn(seed, tokens, heads, 2 * width, dtype=dtype)
        return x, gates, torch.arange(tokens)

    def call(ops: Any, given: Inputs, cache: dict[str, Tensor], batch: Batch) -> Tensor:
        x, gates, positions = given
        batch.positions = positions
        result: Tensor = ops.rg_lru(x, gates, rates, bias, cache, batch)
        return result

    return Op(spec, inputs, call)


def state_space(rng: Random, dtype: torch.dtype) -> Op:
    groups, limits = rng.randint(1, 2), rng.choice(((0.0, inf), (0.4, 0.9)))
    dims = rng.choice((8, 24, 64)), rng.choice((16, 20, 128))
    sizes = StateSpaceSizes(groups * rng.randint(1, 3), groups, *dims, *limits)
    config = Mamba2Config(sizes.heads, sizes.head_dim, groups, sizes.state_size, 4)
    spec = config.spec(str(dtype).removeprefix("torch."))
    parameters = [randn(number, sizes.heads) for number in (1, 2, 3)]

    def inputs(seed: int, tokens: int) -> Inputs:
        channels = spec.inputs["xbc"].shape[0]
        return randn(seed, tokens, channels, dtype=dtype), randn(seed + 1, tokens, sizes.heads, dtype=dtype)

    def call(ops: Any, given: Inputs, cache: dict[str, Tensor], batch: Batch) -> Tensor:
        result: Tensor = ops.state_space(*given, *parameters, sizes, cache, batch)
        return result

    return Op(spec, inputs, call)


def lightning(rng: Random, dtype: torch.dtype) -> Op:
    heads, dim = rng.randint(1, 3), rng.choice((8, 24, 64))
    spec = LightningConfig(heads, dim, 4).spec(str(dtype).removeprefix("torch."))
    decay = randn(1, heads).sigmoid()

    def inputs(seed: int, tokens: int) -> Inputs:
        return (randn(seed, tokens, 3 * heads * dim, dtype=dtype) * dim**-0.5,)

    def call(ops: Any, given: Inputs, cache: dict[str, Tensor], batch: Batch) -> Tensor:
        result: Tensor = ops.lightning_attention(*given, decay, cache, batch)
        return result

    return Op(spec, inputs, call)


OPS: dict[str, Callable[[Random, torch.dtype], Op]] = {
    "convolution": convolution,
    "delta rule": delta_rule,
    "delta rule by channel": partial(delta_rule, by_channel=True),
    "state space": state_space,
    "lightning attention": lightning,
    "selective scan": selective_scan,
    "RG-LRU": rg_lru,
}


def new_cache(spec: StateSpec) -> dict[str, Tensor]:
    """Empty states of ``ROWS`` rows and as many snapshots."""
    state = {n: torch.zeros(2 * ROWS, *p.shape, dtype=getattr(torch, p.dtype)) for n, p in spec.state.items()}
    inputs = {n: torch.zeros(ROWS, MAX_DRAFTS, *p.shape, dtype=getattr(torch, p.dtype)) for n, p in spec.inputs.items()}
    return state | inputs


def batch_of(
    rows: list[int], lengths: list[int], accepted: list[int], drafts: list[int], saves: list[list[tuple[int, int]]]
) -> Batch:
    """Batch with the metadata that state ops read."""

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts, save_starts = [0], [0]
    for length, own in zip(lengths, saves, strict=True):
        starts.append(starts[-1] + length)
        save_starts.append(save_starts[-1] + len(own))
    flat = [save for own in saves for save in own]
    states = StateBatch(
        [],
        tensor(rows),
        tensor(accepted),
        tensor(drafts),
        tensor(save_starts),
        tensor([after for after, _ in flat]),
        tensor([slot for _, slot in flat]),
    )
    empty = torch.zeros(0, dtype=torch.int64)
    attention = AttentionMetadata(tensor(starts), tensor(lengths), torch.zeros(len(rows), 1, dtype=torch.int32))
    return Batch(empty, empty, empty, attention, empty, attention, states=states)


def whole(ops: Any, op: Op, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and state of a sequence in one step."""
    cache = new_cache(op.spec)
    out = op.call(ops, inputs, cache, batch_of([0], [len(inputs[0])], [0], [0], [[]]))
    return out, {name: cache[name][0] for name in op.spec.state}


def check_against_reference(ops: Any, op: Op, inputs: Inputs, tolerance: float) -> None:
    """Check outputs and the state of a sequence."""
    (got, state), (expected, expected_state) = whole(ops, op, inputs), whole(reference, op, inputs)
    torch.testing.assert_close(got, expected, atol=5 * tolerance, rtol=tolerance)
    for part, values in state.items():
        torch.testing.assert_close(values, expected_state[part], atol=1e-4, rtol=1e-4)


def check_division(ops: Any, op: Op, rng: Random, seed: int, total: int) -> None:
    """Check bits of sequences of ``total`` tokens, which advance by random numbers of tokens in random batches. Some
    tokens come as drafts, of which some are rejected; some sequences start again from a snapshot of another row."""
    inputs = [op.inputs(seed % 1000 + row, total) for row in range(ROWS)]
    wrong = op.inputs(seed % 1000 + ROWS, MAX_DRAFTS)
    expected = [whole(ops, op, given) for given in inputs]
    cache, done, accepted = new_cache(op.spec), [0] * ROWS, [0] * ROWS
    snapshots: dict[int, int] = {}
    while min(done) < total:
        rows = rng.sample([row for row in range(ROWS) if done[row] < total], k=1) if rng.random() < 0.2 else None
        rows = rows or [row for row in range(ROWS) if done[row] < total]
        lengths, drafts, right, saves, parts = [], [], [], [], []
        for row in rows:
            left = total - done[row]
            count = rng.randint(1, min(left, 12))
            drafted = rng.randint(0, MAX_DRAFTS)
            taken = min(rng.randint(0, drafted), left - count)
            save = rng.randint(1, count) if rng.random() < 0.5 else 0
            saves.append([(save, ROWS + row)] if save else [])
            if save:
                snapshots[row] = done[row] + save
            lengths.append(count + drafted)
            drafts.append(drafted)
            right.append(taken)
            parts.append(
                [
                    torch.cat((own[done[row] : done[row] + count + taken], other[: drafted - taken]))
                    for own, other in zip(inputs[row], wrong, strict=True)
                ]
            )
        batch = batch_of(rows, lengths, [accepted[row] for row in rows], drafts, saves)
        out = op.call(ops, tuple(torch.cat(part) for part in zip(*parts, strict=True)), cache, batch)
        for row, got, length, drafted, taken in zip(rows, out.split(lengths), lengths, drafts, right, strict=True):
            valid = length - drafted + taken
            assert torch.equal(got[:valid], expected[row][0][done[row] : done[row] + valid])
            done[row] += valid
            accepted[row] = taken
            if row in snapshots and rng.random() < 0.2:
                for part in op.spec.state:
                    cache[part][row] = cache[part][ROWS + row]
                done[row], accepted[row] = snapshots[row], 0
    for row in range(ROWS):
        if not accepted[row]:
            for part, values in expected[row][1].items():
                assert torch.equal(cache[part][row], values)


@few
@given(seed=seeds)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernel_matches_reference(name: str, dtype: torch.dtype, seed: int) -> None:
    rng = Random(seed)
    op = OPS[name](rng, dtype)
    check_against_reference(cpu, op, op.inputs(seed % 1000, rng.randint(1, 40)), TOLERANCE[dtype])


@few
@given(seed=seeds)
@pytest.mark.parametrize("name", OPS)
def test_bits_do_not_depend_on_steps_drafts_and_snapshots(name: str, seed: int) -> None:
    rng = Random(seed)
    op = OPS[name](rng, rng.choice((torch.float32, torch.bfloat16)))
    check_division(cpu, op, rng, seed, rng.randint(8, 30))


@few
@given(seed=seeds)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_product_of_rows_matches_reference(dtype: torch.dtype, seed: int) -> None:
    rng = Random(seed)
    tokens, size = rng.randint(0, 20), rng.choice((5, 16, 100))
    x, gate = randn(seed % 1000, tokens, 2 * size, dtype=dtype).chunk(2, -1)
    function = rng.choice(("", *ACTIVATIONS))
    expected = reference.multiply(x, gate, function)
    torch.testing.assert_close(cpu.multiply(x, gate, function), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    wide = torch.zeros(tokens, 3 * size, dtype=dtype)
    out = cpu.multiply(x, gate, function, wide[:, size : 2 * size])
    assert torch.equal(out, cpu.multiply(x, gate, function)) and not wide[:, :size].any()
