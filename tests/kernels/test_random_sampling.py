"""CPU kernel of random sampling: compared with the reference distribution, with the same bits for every instruction
set, batch and number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import EXAMPLES, cpu, kernels, randn, seeds
from torch import Tensor

from penstock.ops import reference
from penstock.ops.sampling import truncated_weights

LARGEST_UNIFORM = 1 - 2**-53
"""Largest number that ``philox.uniform`` returns."""
TOLERANCE = 1e-5
"""Rounding error of cumulative probabilities."""


@pytest.fixture(autouse=True)
def restored_kernels() -> Iterator[None]:
    before = kernels.current()
    cpu.set_threads(2)
    yield
    kernels.use(before)
    cpu.set_threads(2)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns(
    uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, ...]:
    """Arguments of ``sample_random`` after the logits, with the same parameters for each row."""
    parameters = (column(value).expand(len(uniform)) for value in (temperature, top_k, top_p, min_p))
    return (*parameters, uniform)


def random_columns(rows: int, vocabulary: int, rng: Random) -> tuple[Tensor, ...]:
    """Random arguments of ``sample_random`` after the logits."""

    def draw(*values: float) -> Tensor:
        return column(*(rng.choice(values) for _ in range(rows)))

    return (
        draw(0.3, 0.7, 1.0, 2.0),
        draw(0, 0, -1, 1, 5, 40, vocabulary // 2, vocabulary - 1, vocabulary),
        draw(1.0, 1.0, 0.9999, 0.9, 0.5, 1e-9),
        draw(0.0, 0.0, 0.01, 0.3),
        column(*(rng.choice((0.0, LARGEST_UNIFORM, *(rng.random() for _ in range(4)))) for _ in range(rows))),
    )


def sample(logits: Tensor, columns: tuple[Tensor, ...]) -> Tensor:
    """Sample with every instruction set; all must return the same tokens."""
    found = []
    for name in kernels.available():
        kernels.use(name)
        token_ids, largest = cpu.sample_random(logits, *columns)
        assert torch.equal(largest.nan_to_num(7), logits.amax(-1).nan_to_num(7))
        assert ((token_ids >= 0) & (token_ids < logits.shape[1])).all()
        found.append(token_ids)
    assert all(torch.equal(each, found[0]) for each in found)
    result: Tensor = found[0]
    return result


def assert_sampled(token_ids: Tensor, logits: Tensor, columns: tuple[Tensor, ...]) -> None:
    """The random number of each row is in the interval of the token in the reference distribution."""
    *parameters, uniform = columns
    weights = truncated_weights(logits, *parameters).double()
    ends = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    chosen, end = (table.gather(-1, token_ids[:, None])[:, 0] for table in (weights / weights.sum(-1, True), ends))
    assert (chosen > 0).all()
    assert (uniform <= end + TOLERANCE).all()
    assert (uniform >= end - chosen - TOLERANCE).all()


def random_logits(kind: str, seed: int, rows: int, vocabulary: int) -> Tensor:
    if kind == "ties":
        return torch.randint(-6, 1, (rows, vocabulary), generator=torch.Generator().manual_seed(seed)) * 0.5
    logits = randn(seed, rows, vocabulary) * {"flat": 0.1, "usual": 1.0, "steep": 4.0, "masked": 1.0}[kind]
    if kind == "masked":
        is_masked = randn(seed + 1, rows, vocabulary) > -1
        is_masked[torch.arange(rows), logits.argmin(-1)] = False
        logits[is_masked] = -inf
    return logits


@pytest.mark.slow_after(2)
@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(
    seed=seeds,
    rows=st.integers(1, 9),
    vocabulary=st.sampled_from([1, 7, 16, 512, 513, 1000, 5003]),
    kind=st.sampled_from(["ties", "flat", "usual", "steep", "masked"]),
)
def test_sampled_tokens_match_reference(seed: int, rows: int, vocabulary: int, kind: str) -> None:
    logits, drawn = random_logits(kind, seed, rows, vocabulary), random_columns(rows, vocabulary, Random(seed))
    assert_sampled(sample(logits, drawn), logits, drawn)


@pytest.mark.parametrize("vocabulary", [49_152, 151_936])
def test_tokens_of_large_vocabularies_match_reference(vocabulary: int) -> None:
    logits = torch.cat([random_logits(kind, 0, 3, vocabulary) for kind in ("ties", "flat", "usual", "steep", "masked")])
    drawn = random_columns(len(logits), vocabulary, Random(vocabulary))
    assert_sampled(sample(logits, drawn), logits, drawn)


@pytest.mark.slow
@given(seed=seeds)
@settings(max_examples=EXAMPLES, deadline=None)
def test_sampled_row_does_not_depend_on_batch_or_threads(seed: int) -> None:
    """Rows without a distribution are in the batch, and the logits are a part of a wider tensor."""
    rng, rows = Random(seed), 6
    vocabulary = rng.choice((7, 600, 3000))
    logits = randn(seed, rows, vocabulary + 3)[:, :vocabulary] * 3
    logits[1], logits[3, 5], logits[4, 2] = -inf, nan, inf
    drawn = random_columns(rows, vocabulary, rng)
    together = sample(logits, drawn)
    for threads in (1, 2, 3):
        cpu.set_threads(threads)
        assert torch.equal(sample(logits, drawn), together)
    for i in range(rows):
        alone = sample(logits[i : i + 1].clone(), tuple(each[i : i + 1] for each in drawn))
        assert torch.equal(alone, together[i : i + 1])


@pytest.mark.parametrize("vocabulary", [1, 33, 2048, 6007])
def test_temperature_0_samples_first_largest_logit(vocabulary: int) -> None:
    logits = torch.randint(-4, 5, (6, vocabulary), generator=torch.Generator().manual_seed(0)).float()
    logits[1, : vocabulary // 2] = -inf
    uniform = torch.rand(6, dtype=torch.float64)
    assert torch.equal(sample(logits, columns(uniform, temperature=0, top_k=3, top_p=0.5)), logits.argmax(-1))
    index, largest = cpu.argmax_of_logits(logits)
    assert torch.equal(index, logits.argmax(-1))
    assert torch.equal(largest, logits.amax(-1))


@pytest.mark.parametrize("masked", ["token", "row"])
@pytest.mark.parametrize("value", [nan, -nan, inf, -inf])
def test_row_without_distribution_has_a_token(value: float, masked: str) -> None:
    logits = randn(0, 4, 700)
    logits[1, slice(None) if masked == "row" else 655] = value
    choices: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
    for parameters in choices:
        sample(logits, columns(torch.full((4,), 0.5, dtype=torch.float64), **parameters))


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 1e-300},
    {"temperature": 1e30},
    {"temperature": 1e300},
    {"top_k": 3},
    {"top_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 2, "top_p": 1e-12, "min_p": 0.2, "temperature": 100.0},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_only_allowed_token_is_sampled(parameters: dict[str, Any]) -> None:
    uniform, size = column(0.0, 0.3, LARGEST_UNIFORM), 1500
    for token in (0, 511, 512, 777, size - 1):
        for logit in (-3e38, -5.0, 0.0, 3e38):
            logits = torch.full((3, size), -inf)
            logits[:, token] = logit
            found = sample(logits, columns(uniform, **parameters))
            assert found.tolist() == [token] * 3


def test_extreme_random_numbers_sample_first_and_last_allowed_token() -> None:
    size = 3000
    for first, last in ((0, size - 1), (13, 2222), (600, 601), (512, 1535)):
        logits = randn(first, 1, size) * 5
        logits[:, :first], logits[:, last + 1 :] = -inf, -inf
        logits[:, first], logits[:, last] = 1.0, 2.0
        choices: list[dict[str, Any]] = [{}, {"top_k": last - first + 1}, {"top_p": 1 - 1e-9}]
        for parameters in choices:
            found = sample(logits.expand(2, -1), columns(column(0.0, LARGEST_UNIFORM), **parameters))
            assert found.tolist() == [first, last]


def test_tiny_temperature_samples_largest_logit() -> None:
    logits = torch.randperm(5000, generator=torch.Generator().manual_seed(0)).float()[None] / 8
    found = sample(logits.expand(3, -1), columns(column(0.0, 0.5, LARGEST_UNIFORM), temperature=1e-9))
    assert found.tolist() == [logits.argmax().item()] * 3


def test_huge_temperature_samples_allowed_tokens_uniformly() -> None:
    """Every third token is allowed."""
    logits, size = randn(0, 1, 3000) * 20, 1000
    logits[:, 1::3], logits[:, 2::3] = -inf, -inf
    uniform = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    for temperature in (1e12, 1e300):
        found = sample(logits.expand(size, -1), columns(uniform, temperature=temperature))
        assert found.tolist() == list(range(0, 3000, 3))


def sampled_set(logits: Tensor, **parameters: Any) -> set[int]:
    """Tokens that 1,000 evenly spaced random numbers sample."""
    uniform = torch.arange(1000, dtype=torch.float64) / 1000
    found = sample(logits[None].expand(1000, -1), columns(uniform, **parameters))
    return set(found.tolist())


def test_ties_at_border_of_top_k_go_to_lower_token_ids() -> None:
    logits = torch.full((1100,), -2.0)
    larger = torch.randperm(1100, generator=torch.Generator().manual_seed(0))[:20]
    ties = torch.tensor([i for i in range(7, 1100, 5) if i not in larger.tolist()])
    logits[larger], logits[ties] = 1.0, 0.5
    for k in (20, 21, 50, 20 + len(ties)):
        assert sampled_set(logits, top_k=k) == {*larger.tolist(), *ties[: k - 20].tolist()}
    assert sampled_set(logits, top_k=19) == set(larger.sort()[0][:19].tolist())


def test_ties_at_border_of_top_p_go_to_lower_token_ids() -> None:
    """All weights are 1, so that sums are exact."""
    logits = torch.zeros(1024)
    for p in (0.75, 0.125, 1 / 1024):
        assert sampled_set(logits, top_p=p) == set(range(int(1024 * p)))
    assert sampled_set(logits, top_k=600, top_p=0.5) == set(range(300))


@pytest.mark.parametrize(
    "parameters", [{"temperature": 0.7}, {"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.05, "temperature": 1.5}], ids=str
)
def test_frequencies_equal_reference_distribution(parameters: dict[str, Any]) -> None:
    """Chi-squared test of 50,000 samples."""
    draws, logits = 50_000, randn(0, 1, 600) * 2
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = columns(uniform, **parameters)
    token_ids, _ = cpu.sample_random(logits.expand(draws, -1), *drawn)
    weights = truncated_weights(logits, *(each[:1] for each in drawn[:4]))[0].double()
    counts, expected = token_ids.bincount(minlength=600), weights / weights.sum() * draws
    assert not counts[expected == 0].any()
    frequent = expected >= 5
    freedom = int(frequent.sum()) - 1
    statistic = ((counts[frequent] - expected[frequent]) ** 2 / expected[frequent]).sum()
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_reference_and_kernel_sample_equal_tokens_of_distinct_logits() -> None:
    logits = randn(3, 16, 1000) * 3
    uniform = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = columns(uniform, 0.8, 40, 0.95, 0.01)
    assert torch.equal(sample(logits, drawn), reference.sample_random(logits, *drawn)[0])
