"""Sampling kernels of the CUDA backend in Triton's interpreter: equal to the reference ops."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from random import Random

import pytest
import torch

pytest.importorskip("triton")

from penstock.ops import reference
from penstock.ops.cuda import matrix, sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns about NaN and infinity

SIZES = (1, 33, 2048, 2049, 6007)
"""Vocabulary sizes of one and of several blocks, including odd sizes."""


def random_bitmask(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, -(-columns // 32)), dtype=torch.int32, generator=generator)


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_columns(rows: int, vocabulary: int, rng: Random) -> list[torch.Tensor]:
    """Random values for the arguments of ``sample_random`` after the logits."""

    def draw(*values: float) -> torch.Tensor:
        return float64(*(rng.choice(values) for _ in range(rows)))

    return [
        draw(0.0, 0.3, 0.7, 1.0, 2.0),
        draw(0, 0, -1, 1, 5, 40, vocabulary - 1, vocabulary),
        draw(1.0, 1.0, 0.999, 0.9, 0.5, 1e-9),
        draw(0.0, 0.0, 0.01, 0.3),
        float64(*(rng.choice((0.0, rng.random(), rng.random(), 1 - 2**-53)) for _ in range(rows))),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_argmax_returns_first_of_equal_maxima(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(-4, 5, (6, size), generator=generator).float()
    logits[1, size // 2] = float("nan")
    logits[2] = float("-inf")
    logits[3, size - 1] = float("inf")
    bitmask = random_bitmask(6, size, generator)
    bitmask[4] = 0
    for allowed in (None, bitmask):
        expected = logits.clone() if allowed is None else reference.apply_bitmask(logits.clone(), allowed)
        index, largest = sampling.argmax_of_logits(logits, allowed)
        assert index.tolist() == expected.max(-1)[1].tolist()
        assert torch.equal(largest.nan_to_num(7), expected.max(-1)[0].nan_to_num(7))
        assert index.dtype == torch.int64
    excluded = sampling.apply_bitmask(logits.clone(), bitmask)
    assert torch.equal(excluded.nan_to_num(7), reference.apply_bitmask(logits.clone(), bitmask).nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_argmax_of_linear_matches_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    head, x = (torch.randn(rows, 96, generator=generator).to(dtype) for rows in (333, 5))
    bitmask = random_bitmask(5, 333, generator)
    for allowed in (None, bitmask):
        index, largest = sampling.argmax(x, matrix.pack([head]), allowed)
        expected = reference.argmax(x.float(), reference.pack([head.float()]), allowed)
        assert torch.equal(index, expected[0])
        torch.testing.assert_close(largest, expected[1])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", SIZES)
def test_random_sampling_equals_reference(size: int) -> None:
    """Distinct logits, and logits with many ties. With ties, the result depends on which of the equal tokens top-k and
    top-p keep; the float64 sums are then exact, so it does not depend on their order."""
    rng, generator = Random(size), torch.Generator().manual_seed(size)
    distinct = torch.randn(5, size, generator=generator) * 3
    ties = torch.randint(-3, 1, (5, size), generator=generator) * 0.5
    ties[:, ::3] = float("-inf")
    ties[:, 0] = 0
    for logits in (distinct, ties):
        columns = random_columns(5, size, rng)
        assert torch.equal(sampling.sample_random(logits, *columns)[0], reference.sample_random(logits, *columns)[0])


def assert_truncated(size: int, top_k: int, top_p: float) -> None:
    """Compare a row in which more tokens than ``MAX_LISTED`` can be sampled with the reference."""
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    columns = [float64(value) for value in (2.0, top_k, top_p, 0.0, 0.4)]
    assert top_k > sampling.MAX_LISTED
    assert torch.equal(sampling.sample_random(logits, *columns)[0], reference.sample_random(logits, *columns)[0])


def test_sampling_with_more_than_max_listed_candidates_equals_reference() -> None:
    assert_truncated(20_001, 19_000, 1.0)


@pytest.mark.thorough
def test_sampling_of_large_vocabulary_equals_reference() -> None:
    assert_truncated(151_936, 90_000, 0.95)


@pytest.mark.slow
def test_sampling_of_a_row_does_not_depend_on_other_rows() -> None:
    """The batch also has rows without a valid distribution, for which any token may be returned."""
    size, rng = 2500, Random(0)
    logits = torch.randn(7, size, generator=torch.Generator().manual_seed(0)) * 3
    logits[1] = float("-inf")
    logits[3, 5] = float("nan")
    logits[5] = float("nan")
    columns = random_columns(7, size, rng)
    together = sampling.sample_random(logits, *columns)[0]
    assert ((together >= 0) & (together < size)).all()
    for i in range(7):
        alone = sampling.sample_random(logits[i : i + 1], *(column[i : i + 1] for column in columns))[0]
        assert alone[0] == together[i]


@pytest.mark.parametrize("size", SIZES)
def test_log_softmax_matches_reference_in_any_batch(size: int) -> None:
    """Rows have the same bits at other memory addresses."""
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(size)) * 5
    table = sampling.log_softmax(logits)
    torch.testing.assert_close(table, reference.log_softmax(logits))
    assert torch.equal(sampling.log_softmax(logits[2:].clone()), table[2:])


@pytest.mark.parametrize("size", SIZES)
def test_topk_orders_equal_values_by_index(size: int) -> None:
    """The order is also by index if fewer than k values are finite."""
    values = torch.randint(-3, 4, (3, size), generator=torch.Generator().manual_seed(size)).float()
    values[1, 1:] = float("-inf")
    for k in {1, min(size, 20), min(size, sampling.MAX_K), min(size, sampling.MAX_K + 1)}:
        found, indices = sampling.topk(values, k)
        assert torch.equal(found, reference.topk(values, k)[0])
        if k <= sampling.MAX_K:
            assert torch.equal(indices, values.sort(dim=-1, descending=True, stable=True)[1][:, :k])


def test_sampling_supports_strided_logits() -> None:
    wide = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    logits, columns = wide[:, :50], random_columns(3, 50, Random(1))
    assert torch.equal(sampling.sample_random(logits, *columns)[0], reference.sample_random(logits, *columns)[0])
    assert torch.equal(sampling.argmax_of_logits(logits)[0], logits.argmax(-1))
