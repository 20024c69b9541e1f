"""The corpus generator: the same bytes every time, nothing held out in it, right answers."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import corpus
import dataset
import pytest
from corpus import Check, Conversation, Split
from evaluate import held_out
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from penstock import demo

EXAMPLE = Path(dataset.__file__).parent
SYSTEM_DECIDES = {"system language", "system style", "story"}
"""Skills whose user turns recur: what is held out there is the system prompt with the question, or the story told."""


def conversations(split: Split, skill: str) -> list[Conversation]:
    rng = Random(f"test:{split}:{skill}")
    return [corpus.converse(rng, split, skill) for _ in range(100 if "recall to" in skill else 1000)]


@pytest.mark.parametrize("skill", corpus.SKILLS)
def test_held_out_never_meets_training(skill: str) -> None:
    train, held = (conversations(split, skill) for split in Split)
    assert {c.key for c in train}.isdisjoint(c.key for c in held)
    if skill not in SYSTEM_DECIDES:
        asked = {m["content"] for c in train for m in c.messages if m["role"] == "user"}
        assert asked.isdisjoint(c.messages[-2]["content"] for c in held if c.messages[-2]["role"] == "user")


def test_no_evaluation_question_is_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    """Against a slice of the very corpus that the shipped model was trained on."""
    trained = {tokenizer.decode(e.ids) for e in slice_of_corpus(part=0)}
    turns = {turn for text in trained for turn in re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)}
    for skill, questions in held_out(count=48, seed=0).items():
        prompts = {dataset.render(tokenizer, q, prompt_only=True) for q in questions}
        assert not any(text.startswith(tuple(prompts)) for text in trained if skill != "story")
        if skill not in SYSTEM_DECIDES | {"no tool"}:
            assert turns.isdisjoint(q.messages[-2]["content"] for q in questions)


def slice_of_corpus(part: int) -> list[dataset.Encoded]:
    """A slice as ``train.py corpus`` draws it with its defaults."""
    shares = corpus.shares_at(part / dataset.SLICES)
    return dataset.draw(0, part, dataset.TOKENS // dataset.SLICES, shares, str(demo.CHAT))


@pytest.mark.parametrize("part", [0, dataset.SLICES - 1])
def test_the_shipped_models_corpus_comes_out_byte_for_byte(part: int) -> None:
    """In a process of its own with another hash seed, against the digest recorded when the model was trained."""
    script = f"import dataset, test_demo_corpus as t; print(dataset.digest(t.slice_of_corpus({part})))"
    path = os.pathsep.join([str(EXAMPLE), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "12345"}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    recorded = dict(line.split() for line in (EXAMPLE / "corpus.sha256").read_text().splitlines())
    assert printed.stdout.split()[-1] == recorded[f"slice-{part}"]


def test_the_tokenizer_comes_out_byte_for_byte(tmp_path: Path) -> None:
    dataset.train_tokenizer(tmp_path, 2048)
    shipped = hashlib.sha256((demo.CHAT / "tokenizer.json").read_bytes()).hexdigest()
    assert hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest() == shipped


@given(value=st.lists(st.text() | st.integers()))
def test_every_value_has_one_split(value: list[object]) -> None:
    assert Split.TRAIN.owns(*value) != Split.HELD_OUT.owns(*value)


@given(wordings=st.lists(st.text(), min_size=5, unique=True), seed=st.integers())
def test_every_wording_has_one_split(wordings: list[str], seed: int) -> None:
    rng = Random(seed)
    drawn = {split: {split.wording(rng, wordings) for _ in range(50)} for split in Split}
    assert drawn[Split.TRAIN].isdisjoint(drawn[Split.HELD_OUT])


@pytest.mark.parametrize("skill", ["add", "subtract", "times table", "think: sum", "think: product"])
def test_arithmetic_is_right(skill: str) -> None:
    for conversation in conversations(Split.TRAIN, skill):
        a, sign, b, _, result = conversation.messages[-1]["content"].split()
        assert int(result) == {"+": int(a) + int(b), "-": int(a) - int(b), "×": int(a) * int(b)}[sign]


@pytest.mark.parametrize("skill", ["recall to 200", "recall to 2000", "recall in chat"])
def test_a_recalled_value_was_told(skill: str) -> None:
    """The last word or number of each answer stands in an earlier user turn."""
    for conversation in conversations(Split.HELD_OUT, skill)[:100]:
        told = " ".join(m["content"] for m in conversation.messages if m["role"] == "user").lower()
        answer = conversation.messages[-1]["content"].rstrip(".。").lower()
        if re.search("[a-z]", answer):
            assert re.findall(r"[\w]+", answer)[-1] in told, answer


@pytest.mark.parametrize("skill", [s for s in corpus.SKILLS if s.startswith("tool")])
def test_calls_fit_their_schemas(skill: str) -> None:
    for conversation in conversations(Split.TRAIN, skill)[:300]:
        offered = {t["function"]["name"]: t["function"]["parameters"] for t in conversation.tools or []}
        for message in conversation.messages:
            for called in message.get("tool_calls", []):
                schema, arguments = offered[called["function"]["name"]], called["function"]["arguments"]
                assert sorted(schema["required"]) == sorted(arguments)
                for name, value in arguments.items():
                    assert isinstance(value, {"string": str, "integer": int}[schema["properties"][name]["type"]])


def test_every_skill_is_graded_or_open() -> None:
    open_skills = {s for s in corpus.SKILLS if conversations(Split.HELD_OUT, s)[0].check is Check.FREE}
    assert open_skills == {"story", "description"}
    assert set(corpus.SHARES) == set(corpus.SKILLS)
