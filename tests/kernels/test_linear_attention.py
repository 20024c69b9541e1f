"""CPU kernels of linear attention, compared with their definition in ``ops.reference``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.ops import Batch, DeltaSizes, Ops, reference
from penstock.ops.batch import AttentionMetadata, StateBatch

cpu = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
SLOTS, DRAFTS = 8, 3
Op = Callable[[Ops, dict[str, Tensor], Batch], Tensor]
"""Function that calls an op of a backend with a cache and a batch."""


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch() -> Batch:
    """Three sequences of 5, 1 and 70 tokens. The first has 2 drafts, the second 3 accepted ones, and the last 2
    snapshots."""
    starts = integers(0, 5, 6, 76)
    none = torch.zeros(0, dtype=torch.int64)
    attention = AttentionMetadata(starts, integers(5, 9, 70), torch.zeros(3, 1, dtype=torch.int32))
    states = StateBatch(
        [],
        slots=integers(4, 0, 2),
        accepted=integers(0, 3, 0),
        drafts=integers(2, 0, 0),
        save_start_loc=integers(0, 0, 0, 2),
        save_after=integers(16, 48),
        save_slots=integers(6, 7),
    )
    return Batch(none, none, none, attention, none, attention, states=states)


def compare(op: Op, cache: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Check that both backends compute the same result and cache, up to rounding."""
    caches = [{name: part.clone() for name, part in cache.items()} for _ in range(2)]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    outputs = [op(backend, each, batch()) for backend, each in zip((cpu, reference), caches, strict=True)]
    torch.testing.assert_close(*outputs, **tolerance)
    for name in cache:
        torch.testing.assert_close(*(each[name] for each in caches), **tolerance)
        assert not torch.equal(caches[0][name], cache[name])  # the op has changed the state, and kept inputs of drafts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 40, 128])
def test_lightning_attention_matches_reference(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    heads = 3
    cache = {
        "state": torch.randn(SLOTS, heads, dim, dim),
        "qkv": torch.randn(SLOTS, DRAFTS, 3 * heads * dim).to(dtype),
    }
    qkv = (torch.randn(76, 3 * heads * dim + 5) * dim**-0.5).to(dtype)[:, 5:]
    decay = torch.tensor([0.3, 0.9, 0.999])
    compare(lambda ops, cache, batch: ops.lightning_attention(qkv, decay, cache, batch), cache, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 40, 128])
@pytest.mark.parametrize(("by_channel", "beta_scale"), [(False, 1.0), (False, 2.0), (True, 1.0)])
def test_gated_delta_rule_matches_reference(by_channel: bool, beta_scale: float, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    keys, values = (3, 3) if by_channel else (2, 4)
    sizes = DeltaSizes(keys, values, dim, dim + 8, beta_scale=beta_scale, decay_dim=dim if by_channel else 1)
    width, gates_width = 2 * keys * dim + values * (dim + 8), values * (1 + sizes.decay_dim)
    cache = {
        "state": torch.randn(SLOTS, values, dim, dim + 8),
        "qkv": torch.randn(SLOTS, DRAFTS, width).to(dtype),
        "gates": torch.randn(SLOTS, DRAFTS, gates_width).to(dtype),
    }
    qkv, gates = torch.randn(76, width).to(dtype), (4 * torch.randn(76, gates_width)).to(dtype)
    log_decay, bias = torch.randn(values), torch.randn(values * sizes.decay_dim)
    compare(
        lambda ops, cache, batch: ops.gated_delta_rule(qkv, gates, log_decay, bias, sizes, cache, batch),
        cache,
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_gated_rms_norm_matches_reference(sigmoid: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(7, 96).to(dtype), (6 * torch.randn(7, 96)).to(dtype), torch.rand(24).to(dtype)
    found, expected = (ops.gated_rms_norm(x, gate, weight, 1e-5, sigmoid=sigmoid) for ops in (cpu, reference))
    torch.testing.assert_close(found, expected)
