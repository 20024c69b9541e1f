"""Compressed attention and hyper-connections of the CUDA backend in Triton's interpreter: equal to the reference ops,
with the same bits in any batch."""

from __future__ import annotations

from random import Random

import interpreted  # noqa: F401 - must precede the import of the kernels
import pytest
import torch
from compressed_checks import (
    Backend,
    check_entries_and_attention,
    check_hyper_connections,
    check_rotation_of_tails,
    check_selection_of_entries,
)
from test_cuda_attention import DTYPES, assert_close
from test_cuda_experts import randn

from penstock.ops import Routing, cuda, reference

BACKEND = Backend(
    cuda,
    DTYPES,
    dims=(16, 48),
    rates=(1, 2, 4, 5, 16),
    vectors=lambda cache: cache.values.view(-1, cache.spec.head_dim),
    assert_close=assert_close,
)
CHECKS = {
    "entries and attention": check_entries_and_attention,
    "selection": check_selection_of_entries,
    "hyper-connections": check_hyper_connections,
    "rotation": check_rotation_of_tails,
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CHECKS)
def test_compressed_ops_match_reference(name: str, seed: int) -> None:
    CHECKS[name](BACKEND, seed)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_routing_by_token_id_matches_reference(scores: str) -> None:
    rng = Random(scores)
    tokens, experts, top_k = 9, rng.choice((8, 33)), rng.randint(1, 8)
    logits, token_ids = randn(0, tokens, experts) * 5, torch.randint(0, 50, (tokens,))
    table = torch.rand(50, experts).argsort(1)[:, :top_k].contiguous()
    routing = Routing(top_k, scores, renormalize=True, scale=1.5, added_sum=1e-20)
    for given in ((), (None, None, token_ids, table)):
        ids, weights = cuda.select_experts(logits, routing, *given)
        expected, others = reference.select_experts(logits, routing, *given)
        assert torch.equal(ids, expected)
        torch.testing.assert_close(weights, others, atol=1e-6, rtol=1e-5)
