"""Sampling against transformers' processors, against frequencies, and alone against in a batch."""

from __future__ import annotations

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

from penstock.core import EngineRequest, PenstockError, ReasoningSpan, SamplingParams
from penstock.engine.guided.reasoning import Thinking
from penstock.engine.scheduling.plan import Draw
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.worker.sampler import NO_SCORES, NOTHING_ALLOWED, adjust, sample

VOCABULARY = 50


def sequence(
    prompt: list[int] | None = None, output: list[int] | None = None, index: int = 0, seed: int = 0, **params: Any
) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 100} | params)
    request = EngineRequest(request_id="0", prompt=prompt or [1, 2], sampling=sampling, eos_token_ids=(0,))
    made = Sequence(request, index, seed, 0)
    made.tokens += output or []
    return made


def scores(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


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
def test_frequencies_are_those_of_the_library(params: dict[str, Any]) -> None:
    """6,000 draws at different positions: chi-squared against the probabilities that its warpers leave."""
    p = SamplingParams(**params)
    warpers: list[Any] = [TemperatureLogitsWarper(p.temperature), MinPLogitsWarper(p.min_p)]
    warpers += [TopKLogitsWarper(p.top_k)] if p.top_k else []
    warpers += [TopPLogitsWarper(p.top_p)]
    row = scores(1)
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.int64), row.clone())[0].softmax(-1)
    draws = 6_000
    many = [sequence(seed=seed, **params) for seed in range(draws)]
    drawn = torch.tensor([d.token_ids[0] for d in sample(row.expand(draws, -1), many)])
    counts = drawn.bincount(minlength=VOCABULARY).double()
    assert counts[expected == 0].sum() == 0
    likely = expected * draws >= 5
    wanted = expected[likely].double() * draws
    freedom = int(likely.sum()) - 1
    assert ((counts[likely] - wanted) ** 2 / wanted).sum() < freedom + 5 * (2 * freedom) ** 0.5 + 1e-3


def test_repetition_penalty_is_the_librarys() -> None:
    row, prompt, output = scores(1), [3, 4, 5], [6, 7, 7]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), row.clone())
    assert torch.equal(adjust(row, [sequence(prompt, output, repetition_penalty=1.3)]), expected)


def test_frequency_and_presence_count_the_output() -> None:
    row = scores(1)
    changed = adjust(row, [sequence([3, 4], [6, 7, 7], frequency_penalty=0.5, presence_penalty=0.25)])
    expected = row.clone()
    expected[0, 6] -= 0.75
    expected[0, 7] -= 1.25
    assert torch.equal(changed, expected)


@pytest.mark.parametrize(
    ("params", "output", "never"),
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
def test_what_must_not_come_does_not(params: dict[str, Any], output: list[int], never: set[int]) -> None:
    changed = adjust(scores(1), [sequence(output=output, **params)])[0]
    assert {i for i, score in enumerate(changed.tolist()) if score < -50} == never


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_row_is_drawn_as_if_alone(seed: int) -> None:
    """Tokens and probabilities, bit by bit, whatever else is in the batch."""
    rng, rows = Random(seed), 6
    sequences = [
        sequence(
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
    together = sample(table, sequences)
    assert together == [sample(table[i : i + 1], [sequences[i]])[0] for i in range(rows)]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0}, {"logprobs": 2}],
)
@pytest.mark.parametrize("spoiled", [float("-inf"), float("inf"), float("nan"), -float("nan")])
def test_a_row_without_a_distribution_fails_and_spoils_no_other(params: dict[str, Any], spoiled: float) -> None:
    table, sequences = scores(3), [sequence(seed=i, **params) for i in range(3)]
    alone = sample(table[[0, 2]], [sequences[0], sequences[2]])
    for place in (7, slice(None)):
        table[1, place] = spoiled
        together = sample(table, sequences)
        assert [together[0], together[2]] == alone
        if place == 7 and spoiled == float("-inf"):  # which forbids a token
            assert together[1].token_ids and not together[1].failure
        else:
            assert together[1] == Draw([], failure=NO_SCORES)


def test_a_row_of_which_nothing_is_allowed_fails() -> None:
    forms = np.full((2, 2), -1, np.int32)
    forms[1] = 0
    guided = [sequence(), sequence()]
    for one in guided:
        one.guide = Thinking(ReasoningSpan(3, 4), 0, None)
    first, second = sample(scores(2), guided, torch.from_numpy(forms))
    assert first.token_ids and second == Draw([], failure=NOTHING_ALLOWED)
    (both,) = sample(scores(1), [sequence(output=[5], allowed_token_ids=(8,), bad_word_ids=((5, 8),))])
    assert both == Draw([], failure=NOTHING_ALLOWED)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_penalties_follow_a_sequence(seed: int) -> None:
    """What is counted from step to step gives the bits of a count from the beginning: as it grows by some tokens at a
    time, looks ahead, is preempted (which leaves its tokens), or goes on from another beam."""
    rng = Random(seed)
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))]
    family = [sequence(prompt, index=index, **params) for index in range(2)]
    row = scores(1, seed % 2**31)

    def check(one: Sequence) -> None:
        fresh = sequence(prompt, one.tokens[len(prompt) :], **params)
        assert torch.equal(adjust(row, [one]), adjust(row, [fresh]))

    for _ in range(rng.randint(1, 12)):
        for one in family:
            check(one)
            guessed = [rng.randrange(VOCABULARY) for _ in range(3)]
            for count in range(4):
                check(one.ahead(guessed[:count]))
            one.tokens += [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.3:
            parent, other = rng.sample(family, 2)
            other.tokens, other.counts = [*parent.tokens, rng.randrange(VOCABULARY)], parent.counts


def test_logprobs_tell_the_models_own_scores() -> None:
    row = scores(1)
    (draw,) = sample(row, [sequence(temperature=0, logprobs=3, logit_bias={7: 100.0})])
    expected = row.log_softmax(-1)[0]
    assert draw.token_ids == [7]
    assert draw.logprobs is not None
    own, *best = draw.logprobs[0]
    assert (own.token_id, own.logprob) == (7, pytest.approx(expected[7].item()))
    assert own.rank == (expected > expected[7]).sum() + 1
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
def test_values_out_of_range_are_named(params: dict[str, Any], field: str) -> None:
    with pytest.raises(PenstockError) as refused:
        SamplingParams(**params)
    assert refused.value.failure.field == field
    assert str(refused.value).startswith(f"{field}: ")
