"""Sampler: compared with transformers' logits processors and with expected frequencies, for single rows and batches."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.core import PenstockError, SamplingParams
from penstock.engine.step import NewRow, RowUpdates, SampledTokens
from penstock.engine.worker import sampler
from penstock.engine.worker.input_batch import InputBatch
from penstock.engine.worker.logits_processors import adjusts_logits
from penstock.engine.worker.row import Position, Row
from penstock.engine.worker.sampler import NON_FINITE_LOGITS, NOTHING_ALLOWED, process_logits
from penstock.ops import Ops

VOCABULARY = 50
BACKENDS: list[Ops] = []
"""The last one has the sampler's kernels."""


@pytest.fixture(params=["reference", "cpu"], autouse=True, scope="module")
def ops(request: pytest.FixtureRequest) -> Iterator[None]:
    pytest.importorskip(f"penstock.ops.{request.param}", reason="the CPU kernels were not built", exc_type=ImportError)
    BACKENDS.append(import_module(f"penstock.ops.{request.param}"))
    yield
    BACKENDS.pop()


def position(
    prompt: list[int] | None = None, output: list[int] | None = None, index: int = 0, seed: int = 0, **params: Any
) -> Position:
    sampling = SamplingParams(**{"max_tokens": 100} | params)
    prompt = prompt or [1, 2]
    tokens = np.array([*prompt, *(output or [])], np.int32)
    stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (0,)))
    new = NewRow(0, tokens, len(prompt), 0, sampling, stops, seed, index)
    return Row(new, tokens, adjusts_logits(sampling)).position(len(tokens))


def sample(
    logits: torch.Tensor, positions: list[Position], grammar_bitmask: np.ndarray | None = None
) -> list[SampledTokens]:
    return sampler.sample(logits, positions, grammar_bitmask, BACKENDS[-1]).result()


def scores(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1, "temperature": 2.0},
        {"top_k": 12, "top_p": 0.8, "temperature": 1.5},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
)
def test_token_frequencies_equal_distribution_of_transformers(params: dict[str, Any]) -> None:
    """6,000 samples with different seeds: chi-squared test against the distribution after transformers' warpers."""
    p = SamplingParams(**params)
    warpers: list[Any] = [TemperatureLogitsWarper(p.temperature), MinPLogitsWarper(p.min_p)]
    warpers += [TopKLogitsWarper(p.top_k)] if p.top_k else []
    warpers += [TopPLogitsWarper(p.top_p)]
    row = scores(1)
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.int64), row.clone())[0].softmax(-1)
    draws = 6_000
    positions = [position(seed=seed, **params) for seed in range(draws)]
    drawn = torch.tensor([d.token_ids[0] for d in sample(row.expand(draws, -1), positions)])
    counts = drawn.bincount(minlength=VOCABULARY).double()
    assert counts[expected == 0].sum() == 0
    frequent = expected * draws >= 5
    expected_counts = expected[frequent].double() * draws
    freedom = int(frequent.sum()) - 1
    assert ((counts[frequent] - expected_counts) ** 2 / expected_counts).sum() < freedom + 5 * (
        2 * freedom
    ) ** 0.5 + 1e-3


def test_repetition_penalty_equals_transformers() -> None:
    row, prompt, output = scores(1), [3, 4, 5], [6, 7, 7]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), row.clone())
    assert torch.equal(process_logits(row, [position(prompt, output, repetition_penalty=1.3)]), expected)


def test_frequency_and_presence_penalties_count_output_tokens() -> None:
    row = scores(1)
    changed = process_logits(row, [position([3, 4], [6, 7, 7], frequency_penalty=0.5, presence_penalty=0.25)])
    expected = row.clone()
    expected[0, 6] -= 0.75
    expected[0, 7] -= 1.25
    assert torch.equal(changed, expected)


@pytest.mark.parametrize(
    ("params", "output", "masked"),
    [
        ({"allowed_token_ids": (8, 9)}, [], set(range(50)) - {8, 9}),
        ({"bad_word_ids": ((5,), (6, 7), (8, 9, 10))}, [8, 9], {5, 10}),
        ({"bad_word_ids": ((6, 7),)}, [6], {7}),
        ({"min_tokens": 2, "stop_token_ids": (4,)}, [5], {0, 4}),
        ({"min_tokens": 2, "stop_token_ids": (4,)}, [5, 5], set()),
        ({"min_tokens": 2, "ignore_eos": True}, [5], set()),
        ({"logit_bias": {3: -100.0}}, [], {3}),
    ],
)
def test_forbidden_tokens_are_masked(params: dict[str, Any], output: list[int], masked: set[int]) -> None:
    changed = process_logits(scores(1), [position(output=output, **params)])[0]
    assert {i for i, score in enumerate(changed.tolist()) if score < -50} == masked


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_sampled_row_does_not_depend_on_batch(seed: int) -> None:
    """Tokens and logprobs of a row are bit-identical in a batch and alone."""
    rng, rows = Random(seed), 6
    positions = [
        position(
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))],
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 9))],
            index=rng.randint(0, 3),
            seed=rng.getrandbits(63),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_k=rng.choice((0, 3, -1)),
            top_p=rng.choice((1.0, 0.8)),
            min_p=rng.choice((0.0, 0.2)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            presence_penalty=rng.choice((0.0, 0.5)),
            logprobs=rng.choice((None, 0, 3)),
        )
        for _ in range(rows)
    ]
    table = scores(rows, seed % 2**31)
    together = sample(table, positions)
    assert together == [sample(table[i : i + 1], [positions[i]])[0] for i in range(rows)]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0}, {"logprobs": 2}],
)
@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), -float("nan")])
def test_non_finite_row_fails_alone(params: dict[str, Any], value: float) -> None:
    table, positions = scores(3), [position(seed=i, **params) for i in range(3)]
    alone = sample(table[[0, 2]], [positions[0], positions[2]])
    for columns in (7, slice(None)):
        table[1, columns] = value
        together = sample(table, positions)
        assert [together[0], together[2]] == alone
        if columns == 7 and value == float("-inf"):  # a single -inf masks that token
            assert together[1].token_ids and not together[1].failure
        else:
            assert together[1] == SampledTokens([], failure=NON_FINITE_LOGITS)


def test_row_without_allowed_token_fails() -> None:
    bitmask = np.full((2, 2), -1, np.int32)
    bitmask[1] = 0
    first, second = sample(scores(2), [position(), position()], bitmask)
    assert first.token_ids and second == SampledTokens([], failure=NOTHING_ALLOWED)
    (both,) = sample(scores(1), [position(output=[5], allowed_token_ids=(8,), bad_word_ids=((5, 8),))])
    assert both == SampledTokens([], failure=NOTHING_ALLOWED)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_incremental_penalties_equal_fresh_penalties(seed: int) -> None:
    """Incrementally updated token counts give the bits of fresh counts, while a row grows, has drafts, gets other
    tokens than it sampled, or continues another beam."""
    rng = Random(seed)
    sampling = SamplingParams(max_tokens=100, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=-0.2)
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))]
    batch, known = InputBatch(2, 300, 16), [[*prompt], [*prompt]]
    new = [NewRow(row, np.array(prompt, np.int32), len(prompt), 0, sampling, (), 0, row) for row in range(2)]
    batch.apply(RowUpdates(new=new))
    logits = scores(1, seed % 2**31)

    def check(row: int, tokens: list[int]) -> None:
        fresh = Row(new[row], np.array(tokens, np.int32), adjusts_logits(new[row].sampling)).position(len(tokens))
        assert torch.equal(
            process_logits(logits, [batch.row(row).position(len(tokens))]), process_logits(logits, [fresh])
        )

    for _ in range(rng.randint(1, 12)):
        for row in range(2):
            check(row, known[row])
            draft = [rng.randrange(VOCABULARY) for _ in range(3)]
            batch.tokens[row, len(known[row]) : len(known[row]) + 3] = draft
            for count in range(4):
                check(row, known[row] + draft[:count])
            if counts := batch.row(row).counts:  # remove the draft tokens from the counts, as after verification
                counts.rewind(len(known[row]))
            first, sampled = len(known[row]), [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3))]
            batch.tokens[row, first : first + len(sampled)] = sampled
            check(row, known[row] + sampled)
            replaced = [*sampled[:-1], rng.randrange(VOCABULARY), rng.randrange(VOCABULARY)]
            offset = first + len(sampled) - 1
            batch.apply(RowUpdates(tokens=np.array([row, offset, 2, *replaced[-2:]], np.int32)))
            known[row] += replaced
        if rng.random() < 0.3:
            parent, token = rng.randrange(2), rng.randrange(VOCABULARY)
            length = len(known[parent])
            batch.apply(RowUpdates(beam_steps=np.array([1 - parent, parent, length, token], np.int32)))
            known[1 - parent] = [*known[parent], token]


def test_logprobs_do_not_include_logit_bias() -> None:
    row = scores(1)
    (draw,) = sample(row, [position(temperature=0, logprobs=3, logit_bias={7: 100.0})])
    expected = row.log_softmax(-1)[0]
    assert draw.token_ids == [7]
    assert draw.logprobs is not None
    sampled, *best = draw.logprobs[0]
    assert (sampled.token_id, sampled.logprob) == (7, pytest.approx(expected[7].item()))
    assert sampled.rank == (expected > expected[7]).sum() + 1
    assert [p.token_id for p in best] == expected.argsort(descending=True)[:3].tolist()
    assert [p.rank for p in best] == [1, 2, 3]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_values_out_of_range_are_refused_with_field(params: dict[str, Any], field: str) -> None:
    with pytest.raises(PenstockError) as refused:
        SamplingParams(**params)
    assert refused.value.failure.field == field
    assert str(refused.value).startswith(f"{field}: ")
