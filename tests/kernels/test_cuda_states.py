"""Ops with recurrent state of the CUDA backend in Triton's interpreter: equal to the reference ops, with the same bits
for any division of the tokens into steps, batches, drafts and snapshots."""

from __future__ import annotations

from random import Random
from typing import Any

import interpreted  # noqa: F401 - must precede the kernels
import pytest
import torch
from test_cuda_attention import DTYPES, FEW
from test_state_ops import OPS, ROWS, batch_of, check_against_reference, check_division, new_cache, randn

from penstock.ops import cuda, reference
from penstock.ops.activations import ACTIVATIONS

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}
FUNCTIONS = ("", *ACTIVATIONS)


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("name", OPS)
def test_kernel_matches_reference(name: str, seed: int) -> None:
    rng = Random(seed)
    dtype = DTYPES[seed % 2]
    op = OPS[name](rng, dtype)
    check_against_reference(cuda, op, op.inputs(seed, rng.randint(1, 8)), TOLERANCE[dtype])


@pytest.mark.slow_after(len(OPS))
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("seed", FEW)
def test_bits_do_not_depend_on_steps_drafts_and_snapshots(name: str, seed: int) -> None:
    rng = Random(seed)
    check_division(cuda, OPS[name](rng, DTYPES[seed % 2]), rng, seed, rng.randint(5, 9))


@pytest.mark.parametrize("name", OPS)
def test_padding_changes_no_state_and_no_bits(name: str) -> None:
    """Padding has no tokens, as in a CUDA graph of more sequences, or slot -1, as in warm-up steps."""
    op = OPS[name](Random(1), torch.float32)
    inputs = op.inputs(1, 4)
    caches = [new_cache(op.spec) for _ in range(2)]
    for cache in caches:
        for number, part in enumerate(cache.values()):
            part.copy_(randn(number, *part.shape))
    before = {part: values.clone() for part, values in caches[0].items()}
    out = op.call(
        cuda, tuple(part[:2] for part in inputs), caches[0], batch_of([2, 1], [1, 1], [2, 0], [0, 0], [[], []])
    )
    padded = batch_of([2, 1, 0, -1], [1, 1, 0, 2], [2, 0, 0, 0], [0, 0, 0, 0], [[(1, ROWS)], [], [], []])
    found = op.call(cuda, inputs, caches[1], padded)
    assert torch.equal(found[:2], out)
    written = [part for part in op.spec.state if not torch.equal(caches[0][part], before[part])]
    assert written
    others = [0, 3, *range(ROWS + 1, 2 * ROWS)]
    for part in written:
        assert torch.equal(caches[1][part][:ROWS], caches[0][part][:ROWS])
        assert torch.equal(caches[1][part][ROWS], caches[0][part][2])
        assert torch.equal(caches[1][part][others], before[part][others])
    for part in op.spec.inputs:
        assert torch.equal(caches[1][part], before[part])


@pytest.mark.parametrize("seed", FEW)
def test_gates_match_reference(seed: int) -> None:
    rng = Random(seed)
    dtype, tokens, groups, size = DTYPES[seed % 2], rng.randint(1, 5), rng.randint(1, 3), rng.choice((5, 16, 100))
    x, gate = randn(seed, tokens, 2 * groups * size, dtype=dtype).chunk(2, -1)
    weight = randn(2, *rng.choice(((size,), (groups, size))), dtype=dtype)
    wide = torch.zeros(tokens, x.shape[1] + 3, dtype=dtype)

    def check(name: str, *given: Any, **options: Any) -> None:
        expected = getattr(reference, name)(*given, **options)
        found = getattr(cuda, name)(*given, **options)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        out = getattr(cuda, name)(*given, out=wide[:, 3:], **options)
        assert torch.equal(out.view(found.shape), found) and not wide[:, :3].any()

    for first, sigmoid in ((False, False), (False, True), (True, False)):
        check("gated_rms_norm", x, gate, weight, 1e-5, gate_first=first, sigmoid=sigmoid)
    for function in FUNCTIONS:
        check("multiply", x, gate, function)
    check("multiply_gate", x, gate)
    heads = x.contiguous().unflatten(1, (groups, size))
    torch.testing.assert_close(
        cuda.multiply_gate(heads, gate), reference.multiply_gate(heads, gate), atol=1e-2, rtol=1e-2
    )
