"""Suffix decoding: the token history, drafts from recent answers, choice of the lengths, and the default."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SMALL, save
from copying_model import copying_model, prompt_to_copy
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MambaConfig

from penstock import LLM, GuidedDecodingParams
from penstock.core import SamplingParams
from penstock.engine.spec_decode.speculation import Draft, Speculation
from penstock.engine.spec_decode.step_time import StepTime
from penstock.engine.spec_decode.suffix import SuffixDrafter

kernels = pytest.importorskip("penstock.ops._kernels", reason="the CPU kernels were not built", exc_type=ImportError)

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 400, "block_size": 16, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


# --- Token history ----------------------------------------------------------------------------------------------------


def longest_match(text: list[int], source: list[int], longest: int) -> int:
    """Length of the longest earlier occurrence in ``source`` of the last tokens of ``text``, by comparing all."""
    best = 0
    for end in range(1, len(source)):
        length = 0
        while length < min(longest, end, len(text)) and source[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        best = max(best, length)
    return best


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 8, 32]),
)
def test_history_finds_an_occurrence_and_the_tokens_after_it(tokens: list[int], sizes: list[int], longest: int) -> None:
    history = kernels.TokenHistory(4096)
    added, parts = 0, itertools.cycle(sizes)
    while added < len(tokens):
        part = tokens[added : added + next(parts)]
        history.append(part)
        added += len(part)
        text = tokens[:added]
        found, expected = history.find(history, longest), longest_match(text, text, longest)
        if not found:
            assert expected == 0
            continue
        position, token, length, occurrences, agreeing = found
        assert 0 < length <= expected and text[position] == token
        assert text[position - length : position] == text[-length:]
        assert 1 <= agreeing <= occurrences
        drafted = history.tokens(position, 8)
        assert drafted == list(itertools.islice(itertools.cycle(text[position:]), len(drafted)))
        assert len(drafted) == 8


def test_history_finds_the_longest_match_in_long_random_text() -> None:
    source = random.Random(0)
    tokens = [source.randrange(2000) for _ in range(20_000)]
    history = kernels.TokenHistory(1 << 15)
    history.append(tokens)
    for length in (1, 2, 3, 4, 7, 31, 32):
        for start in (5, 9_000, 19_000):
            text = kernels.TokenHistory(64)
            text.append([5000, *tokens[start : start + length]])
            position, token, found, *_ = history.find(text, 32)
            assert found == length and tokens[position - length : position] == tokens[start : start + length]
            assert token == tokens[position]


def test_history_is_bounded_and_forgets_its_oldest_tokens() -> None:
    history, text = kernels.TokenHistory(1024), kernels.TokenHistory(64)
    history.append(list(range(1024)))
    size = history.bytes
    text.append([10, 11, 12])
    assert history.find(text, 32)[1] == 13
    for start in range(1024, 50_000, 1000):
        history.append(list(range(start, start + 1000)))
    assert history.bytes == size <= 40 * 1024 + 64
    assert history.find(text, 32) is None
    text.append([49_500, 49_501])
    assert history.find(text, 32)[1] == 49_502


def test_separator_ends_matches_and_drafts() -> None:
    history, text = kernels.TokenHistory(64), kernels.TokenHistory(64)
    history.append([1, 2, 3, history.SEPARATOR, 4, 5, 6, history.SEPARATOR])
    text.append([9, 1, 2])
    position, token, length, *_ = history.find(text, 32)
    assert (token, length, history.tokens(position, 8)) == (3, 2, [3])
    text.append([3])
    assert history.find(text, 32) is None


# --- Choice of the lengths --------------------------------------------------------------------------------------------


def rate(step: StepTime, gains: list[list[float]], lengths: tuple[int, ...], rows: int) -> float:
    tokens = len(gains) + sum(sum(each[:length]) for each, length in zip(gains, lengths, strict=True))
    return tokens / step.seconds(rows + sum(lengths))


@pytest.mark.parametrize("slope", [0.01, 0.05, 0.1, 0.3])
def test_lengths_of_drafts_maximize_expected_tokens_per_second(slope: float) -> None:
    source = random.Random(str(slope))
    for _ in range(50):
        speculation = Speculation(SuffixDrafter(), 4)
        step = speculation._step_time
        for _ in range(40):
            rows = source.randint(1, 12)
            step.record(rows, 1 + slope * rows)
        sequences = source.randint(1, 3)
        gains = [
            list(itertools.accumulate((source.random() for _ in range(4)), lambda a, b: a * b))
            for _ in range(sequences)
        ]
        drafts = [Draft([7] * 4, each) for each in gains]
        chosen = tuple(speculation.choose_lengths(drafts, sequences, sequences))
        best = max(rate(step, gains, each, sequences) for each in itertools.product(range(5), repeat=sequences))
        assert rate(step, gains, chosen, sequences) > 0.98 * best


def test_step_time_follows_measured_steps_and_changes_of_the_speed() -> None:
    """A line with a jump at 9 rows, on a machine that becomes slower by half: the ratio of two sizes stays right."""

    def duration(rows: int) -> float:
        return 10 + 0.5 * rows + 3 * (rows > 8)

    source, step = random.Random(0), StepTime(0.1)
    for speed in (1.0, 1.5):
        for _ in range(600):
            rows = source.choice((1, 2, 4, 8, 9, 12, 16))
            step.record(rows, speed * duration(rows) * source.uniform(0.9, 1.1))
        for rows in (1, 8, 9, 16):
            assert step.seconds(rows) / step.seconds(4) == pytest.approx(
                (10 + 0.5 * rows + 3 * (rows > 8)) / 12, rel=0.05
            )
        assert step.seconds(4) == pytest.approx(12 * speed, rel=0.1)


def test_sequence_with_failing_drafts_stops_drafting() -> None:
    """The prompt repeats tokens, each time followed by another one; the model generates random tokens."""
    source = random.Random(0)
    block = [source.randrange(1000, 2000) for _ in range(8)]
    prompt = [token for _ in range(12) for token in (*block, source.randrange(1000, 2000))]
    llm = LLM(max_num_seqs=1, **OPTIONS)
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=300, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    speculation = llm.engine.speculation
    assert speculation and speculation.stats.draft_tokens < 60


# --- Drafts ----------------------------------------------------------------------------------------------------------


def accepted_tokens(llm: LLM) -> int:
    assert llm.engine.speculation
    return llm.engine.speculation.stats.accepted_tokens


def test_recent_answers_are_drafted_only_for_requests_with_the_same_salt() -> None:
    llm = LLM(speculative_config={"method": "suffix", "adaptive": False}, enable_prefix_caching=False, **OPTIONS)
    prompt = "Once upon a time"
    answers, accepted = [], []
    for salt in ("a", "b", "a", "b", ""):
        before = accepted_tokens(llm)
        (output,) = llm.generate([{"prompt": prompt, "cache_salt": salt or None}], GREEDY, use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
        accepted.append(accepted_tokens(llm) - before)
    assert all(each == answers[0] for each in answers)
    assert accepted[0] == accepted[1] == accepted[4] < accepted[2] - 10 and accepted[2] == accepted[3]


def test_no_answers_are_kept_with_zero_cached_requests() -> None:
    config = {"method": "suffix", "adaptive": False, "suffix_decoding_max_cached_requests": 0}
    llm = LLM(speculative_config=config, enable_prefix_caching=False, **OPTIONS)
    counts = [0]
    for _ in range(2):
        llm.generate("Once upon a time", GREEDY, use_tqdm=False)
        counts.append(accepted_tokens(llm))
    assert counts[2] - counts[1] == counts[1] - counts[0]


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copying_model(tmp_path_factory.mktemp("copying"), "{{ messages }}")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "config", [{"method": "suffix"}, {"method": "ngram", "prompt_lookup_min": 1}], ids=lambda config: config["method"]
)
def test_forced_tokens_are_the_same_with_drafts(copying: Path, config: dict[str, Any]) -> None:
    """The model tries to generate a quotation mark wherever several characters after one are forced, and are one token.
    Drafts from the prompt have the tokens that the model tries to generate."""
    keys = ["customer_identifier", "shipping_address", "telephone_number"]
    record = {"type": "object", "properties": {key: {"enum": ["abc", "abd", 12]} for key in keys}, "required": keys}
    schema = {"type": "array", "items": record | {"additionalProperties": False}, "minItems": 4, "maxItems": 6}
    options: dict[str, Any] = {"max_model_len": 1000, "num_gpu_blocks_override": 300, "block_size": 16}
    plain = LLM(copying, speculation=False, **options)
    drafting = LLM(copying, speculative_config=config | {"adaptive": False}, **options)
    tokenizer, source = plain.get_tokenizer(), random.Random(0)
    (quote,) = tokenizer.encode('"', add_special_tokens=False)
    prompts = []
    for _ in range(8):
        records = [{key: source.choice(["abc", "abd", 12]) for key in keys} for _ in range(5)]
        tokens = tokenizer.encode(json.dumps(records, separators=(",", ":")), add_special_tokens=False)
        tokens = [quote if tokenizer.decode([token]) == '","' else token for token in tokens]
        prompts.append({"prompt_token_ids": prompt_to_copy(tokens, tokenizer.eos_token_id)})
    guided = GuidedDecodingParams(json=schema, disable_any_whitespace=True)
    for more in ({}, {"logprobs": 0}, {"stop": ["@"]}):
        params = SamplingParams(temperature=0, max_tokens=300, guided_decoding=guided, **more)
        expected, found = (
            [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)] for llm in (plain, drafting)
        )
        assert [(one.token_ids, one.logprobs) for one in found] == [(one.token_ids, one.logprobs) for one in expected]
        assert all(len(json.loads(one.text)) >= 4 for one in found)
    assert accepted_tokens(drafting) > 0


def test_forced_tokens_are_drafted_where_they_cannot_be_appended() -> None:
    """Requests with log probabilities need the model for each token, but not a step."""
    llm = LLM(**OPTIONS)
    guided = GuidedDecodingParams(json={"const": {"customer_identifier": "none", "shipping_address": "none"}})
    before = llm.engine.steps
    params = SamplingParams(temperature=0, max_tokens=100, guided_decoding=guided, logprobs=0)
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert json.loads(output.outputs[0].text)["shipping_address"] == "none"
    assert llm.engine.steps - before < len(output.outputs[0].token_ids)


# --- Default ---------------------------------------------------------------------------------------------------------


def test_suffix_decoding_is_the_default_and_can_be_turned_off(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path)
    small: dict[str, Any] = {"num_gpu_blocks_override": 40}
    assert LLM(tmp_path, **small).engine.speculation is not None
    for off in ({"speculation": False}, {"speculative_config": {"method": "none"}}, {"pipeline_parallel_size": 2}):
        llm = LLM(tmp_path, **small, **off)
        assert llm.engine.speculation is None
        llm.engine.close()
    given = LLM(tmp_path, speculation=False, speculative_config={"method": "ngram"}, **small)
    assert given.engine.speculation is None


def test_suffix_decoding_is_not_the_default_with_recurrent_states(tmp_path: Path, caplog: Any) -> None:
    save(MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, state_size=8), tmp_path)
    with caplog.at_level("INFO", logger="penstock"):
        assert LLM(tmp_path, num_gpu_blocks_override=40, max_model_len=256).engine.speculation is None
    assert "speculative decoding: off (it is not the default for MambaForCausalLM" in caplog.text
    given = LLM(tmp_path, num_gpu_blocks_override=40, max_model_len=256, speculative_config={"method": "suffix"})
    assert given.engine.speculation is not None
