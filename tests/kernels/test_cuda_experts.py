"""Mixture-of-experts kernels of the CUDA backend in Triton's interpreter: equal to the reference ops, with the same
bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import interpreted  # noqa: F401 - must precede the import of the kernels
import pytest
import torch
from checkpoints import SMALL, save
from test_cuda_matrix import FORMATS, STORED, draw_quantized, randn, tolerance
from torch import Tensor
from transformers import Qwen3MoeConfig

from penstock import LLM, SamplingParams
from penstock.core import PenstockError
from penstock.ops import Format, Routing, cuda, reference

ROUTINGS = {
    "softmax": Routing(2),
    "renormalized": Routing(4, renormalize=True),
    "added sum": Routing(4, "sigmoid", renormalize=True, added_sum=0.3),
    "sigmoid, groups": Routing(3, "sigmoid", True, 1e-20, 2.5, groups=4, top_groups=2, group_score="two best"),
    "softmax, groups": Routing(3, scale=16.0, groups=4, top_groups=2),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_expert_routing_matches_reference(routing: Routing) -> None:
    logits = randn(0, 20, 12)
    for bias, factors in ((None, None), (randn(1, 12), None), (None, randn(2, 12))):
        got, expected = (ops.select_experts(logits, routing, bias, factors) for ops in (cuda, reference))
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1], atol=1e-6, rtol=1e-5)
    invalid = torch.stack((torch.full((12,), float("nan")), torch.full((12,), float("-inf")), logits[0]))
    invalid[2, 3] = float("nan")
    ids, _ = cuda.select_experts(invalid, routing)
    assert all(len(set(row)) == routing.top_k and max(row) < 12 for row in ids.tolist())


def compute(ops: Any, x: Tensor, matrices: Any, ids: Tensor, weights: Tensor, *shared: Tensor) -> Tensor:
    gate_up, down = matrices
    outputs = ops.experts_linear(ops.experts_activation_and_mul(x, gate_up, ids, "silu"), down, ids)
    result: Tensor = ops.combine_experts(outputs, weights, *shared)
    return result


KINDS = {name: FORMATS[name] for name in ("none", "w8a8", "wint8", "fp8", "fp8 blocks")}
KINDS |= {"4 bits, 8-bit activations, rotated": Format(4, 32, 8, rotation=64)}
KINDS |= {f"stored, {name}": STORED[name] for name in ("4 bits, offsets", "4 bits", "fp8 per tensor", "mxfp4")}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_expert_products_match_reference_in_any_batch(name: str) -> None:
    """Tests all formats. Each row of a batch has the same bits alone."""
    format, experts, hidden, size, dtype = KINDS[name], 4, 64, 40, torch.float16

    def pack(ops: Any, seed: int, outputs: int, inputs: int) -> Any:
        if name.startswith("stored"):
            return ops.pack_quantized([draw_quantized(seed, outputs, inputs, format, None)], dtype)
        return ops.pack([randn(seed, outputs, inputs, dtype=dtype) * 0.1], None, format)

    def matrices(ops: Any, first: int = 0) -> Any:
        local = range(experts)[first:]
        gate_up = ops.stack_experts([pack(ops, 2 * e, 2 * size, hidden) for e in local], first)
        return gate_up, ops.stack_experts([pack(ops, 2 * e + 1, hidden, size) for e in local], first)

    x, shared, gate = randn(1, 9, hidden, dtype=dtype), randn(2, 9, hidden, dtype=dtype), randn(3, 9, 1)
    ids, weights = reference.select_experts(randn(4, 9, experts), Routing(2, renormalize=True))
    ids = ids.contiguous()
    got, expected = (compute(ops, x, matrices(ops), ids, weights, shared, gate) for ops in (cuda, reference))
    error = (got.double() - expected.double()).abs().max() / expected.abs().max()
    assert error < 2 * tolerance(dtype), error
    for row in (0, 8):
        rows = slice(row, row + 1)
        alone = compute(cuda, x[rows], matrices(cuda), ids[rows], weights[rows], shared[rows], gate[rows])
        assert torch.equal(alone[0], got[row])
    merged = torch.full((9, 2, size), 7, dtype=dtype)
    cuda.experts_activation_and_mul(x, matrices(cuda, 2)[0], ids, "silu", merged)
    assert bool((merged[ids < 2] == 7).all()) and not bool((merged[ids >= 2] == 7).all(-1).any())


def test_experts_with_act_order_are_refused() -> None:
    weight = draw_quantized(0, 64, 64, Format(4, 32), torch.arange(64))
    with pytest.raises(PenstockError, match="desc_act"):
        cuda.stack_experts([cuda.pack_quantized([weight], torch.float16)] * 2)


@pytest.mark.slow
def test_expert_load_excludes_graph_padding(tmp_path: Path) -> None:
    """Three sequences decode in a graph of four rows: the experts of the padding row are not counted."""
    config = Qwen3MoeConfig(
        **SMALL | {"num_hidden_layers": 2}, moe_intermediate_size=32, num_local_experts=8, num_experts_per_tok=2
    )
    save(config, tmp_path)
    llm = LLM(
        tmp_path,
        dtype="float32",
        device="cpu",
        ops="cuda",
        cudagraph_capture_sizes=(4,),
        expert_load=True,
        num_gpu_blocks_override=20,
    )
    llm.generate([[5, 6, 7]] * 3, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert sum(llm.engine.expert_load[0]) == 2 * 3 * (3 + 3)
