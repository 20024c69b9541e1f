"""PyTorch functions within ``BatchInvariance``: the bits of a row do not depend on the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layers import BuildContext
from penstock.models.transformers.invariance import BatchInvariance
from penstock.models.weights import DummyWeights

cpu = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
LAYER = nn.Linear(37, 5)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "exp in place": lambda x: x.clone().exp_(),
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "linear": lambda x: F.linear(x, LAYER.weight, LAYER.bias),
    "product with the transposed parameter": lambda x: x @ LAYER.weight.T,
    "product with a part of a parameter": lambda x: F.linear(x, LAYER.weight[:3]),
    "sigmoid of the transposed rows": lambda x: torch.sigmoid(x.T).T,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.inference_mode()
def test_rows_have_same_bits_for_any_number_of_rows(name: str) -> None:
    function, x = FUNCTIONS[name], torch.randn(50, 37, generator=torch.Generator().manual_seed(0))
    context = BuildContext(cpu, DummyWeights(Path(), torch.float32), torch.float32, torch.device("cpu"), 64)
    mode, threads = BatchInvariance(context, LAYER), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = function(x)
        with mode:
            whole = function(x)
            parts = {(a, b): function(x[a:b].clone()) for a in range(0, 50, 7) for b in range(a + 1, 51, 5)}
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(whole, expected)
    assert mode.is_needed and not mode.variant
    for (first, end), part in parts.items():
        assert torch.equal(part, whole[first:end])


@torch.inference_mode()
def test_other_products_are_named() -> None:
    context = BuildContext(cpu, DummyWeights(Path(), torch.float32), torch.float32, torch.device("cpu"), 64)
    x = torch.randn(2, 3, 3)
    with BatchInvariance(context, LAYER) as mode:
        torch.bmm(x, x)
        x @ x
        x[..., :1] @ x[:, :1]  # sums of one term
    assert mode.variant == {"bmm", "matmul"}
