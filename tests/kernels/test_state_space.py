"""Ops of Mamba 2 layers: the CPU kernels compute the results, states and snapshots of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
import torch
from torch import Tensor

from penstock.ops import AttentionMetadata, Batch, StateBatch, StateSpaceSizes, reference

cpu = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

SLOTS, MAX_DRAFTS = 6, 3


def batch_of(lengths: Sequence[int], accepted: Sequence[int], drafts: Sequence[int], saves: Sequence[int]) -> Batch:
    """A batch of sequences in slots 0, 1, ...

    Args:
        saves: number of tokens of the first sequence after which its state is copied; to slots 5, 4, ...
    """

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    count = len(lengths)
    states = StateBatch(
        [],
        integers(range(count)),
        integers(accepted),
        integers(drafts),
        integers([0, *[len(saves)] * count]),
        integers(saves),
        integers([SLOTS - 1 - index for index in range(len(saves))]),
    )
    starts = integers([sum(lengths[:index]) for index in range(count + 1)])
    attention = AttentionMetadata(starts, integers(lengths), integers([0]))
    none = torch.empty(0, dtype=torch.int64)
    return Batch(none, none, none, attention, none, attention, states=states)


@pytest.mark.parametrize("limits", [(0.0, inf), (0.4, 0.9)])
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "state_size"), [(4, 1, 64, 16), (6, 2, 24, 20), (2, 2, 8, 256)]
)
def test_state_space_matches_the_reference(
    heads: int, groups: int, head_dim: int, state_size: int, limits: tuple[float, float]
) -> None:
    torch.manual_seed(0)
    sizes = StateSpaceSizes(heads, groups, head_dim, state_size, *limits)
    channels = heads * head_dim + 2 * groups * state_size
    parameters = [torch.randn(heads) for _ in range(3)]
    cache = {
        "state": torch.randn(SLOTS, heads, state_size, head_dim),
        "xbc": torch.randn(SLOTS, MAX_DRAFTS, channels),
        "steps": torch.randn(SLOTS, MAX_DRAFTS, heads),
    }
    batch = batch_of([7, 1, 3], [0, 2, 1], [0, 0, 2], [3, 7])
    xbc, steps = torch.randn(11, channels), torch.randn(11, heads)
    caches = [{name: part.clone() for name, part in cache.items()} for _ in range(2)]
    results = [
        ops.state_space(xbc, steps, *parameters, sizes, each, batch)
        for ops, each in zip((reference, cpu), caches, strict=True)
    ]
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    for name in cache:
        torch.testing.assert_close(caches[0][name], caches[1][name], atol=1e-4, rtol=1e-4)
        assert not torch.equal(caches[1][name], cache[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_concatenation_match_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(5, 100, dtype=dtype), torch.randn(5, 40, dtype=dtype)
    torch.testing.assert_close(cpu.multiply(x[:, 30:70], gate, "silu"), reference.multiply(x[:, 30:70], gate, "silu"))
    assert torch.equal(cpu.concatenate(x, gate), reference.concatenate(x, gate))
