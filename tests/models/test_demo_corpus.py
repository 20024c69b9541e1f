"""The corpus generator: reproducible bytes, no held-out content in training, correct answers."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import corpus
import dataset
import jsonschema
import pytest
from corpus import Check, Conversation, Split, recall
from evaluate import held_out
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from penstock import demo

EXAMPLE = Path(dataset.__file__).parent
RECURRING = {"system language", "system style", "story", *recall.SKILLS}
"""Skills with the same last user turns in both splits. Only system prompts, stories, or facts are held out."""


@functools.cache
def conversations(split: Split, skill: str) -> list[Conversation]:
    rng = Random(f"test:{split}:{skill}")
    return [corpus.converse(rng, split, skill) for _ in range(100 if "recall to" in skill else 1000)]


@pytest.mark.parametrize("skill", corpus.SKILLS)
def test_held_out_conversations_are_not_in_training(skill: str) -> None:
    train, held = (conversations(split, skill) for split in Split)
    assert {c.key for c in train}.isdisjoint(c.key for c in held)
    if skill not in RECURRING:
        questions = {m["content"] for c in train for m in c.messages if m["role"] == "user"}
        assert questions.isdisjoint(c.messages[-2]["content"] for c in held if c.messages[-2]["role"] == "user")


@pytest.mark.thorough
def test_no_evaluation_question_is_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    """Checks a slice of the shipped model's corpus."""
    trained = {tokenizer.decode(e.ids) for e in slice_of_corpus(part=0)}
    turns = {turn for text in trained for turn in re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)}
    for skill, questions in held_out(count=48, seed=0).items():
        prompts = {dataset.render(tokenizer, q, prompt_only=True) for q in questions}
        assert not any(text.startswith(tuple(prompts)) for text in trained if skill != "story")
        if skill not in RECURRING | {"tool call", "no tool"}:  # passages also have such questions: "Where is the cup?"
            assert turns.isdisjoint(q.messages[-2]["content"] for q in questions)


def slice_of_corpus(part: int) -> list[dataset.Encoded]:
    """A slice of the corpus, as drawn by ``train.py corpus`` with default options."""
    shares = corpus.shares_at(part / dataset.SLICES)
    return dataset.draw(0, part, dataset.TOKENS // dataset.SLICES, shares, str(demo.CHAT))


@pytest.mark.thorough
@pytest.mark.parametrize("part", [0, dataset.SLICES - 1])
def test_corpus_of_shipped_model_is_reproduced_byte_for_byte(part: int) -> None:
    """A subprocess with another hash seed compares the digest that was recorded when the model was trained."""
    script = f"import dataset, test_demo_corpus as t; print(dataset.digest(t.slice_of_corpus({part})))"
    path = os.pathsep.join([str(EXAMPLE), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "12345"}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    recorded = dict(line.split() for line in (EXAMPLE / "corpus.sha256").read_text().splitlines())
    assert printed.stdout.split()[-1] == recorded[f"slice-{part}"]


@pytest.mark.thorough
def test_tokenizer_is_reproduced_byte_for_byte(tmp_path: Path) -> None:
    dataset.train_tokenizer(tmp_path, 2048)
    shipped = hashlib.sha256((demo.CHAT / "tokenizer.json").read_bytes()).hexdigest()
    assert hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest() == shipped


@pytest.mark.parametrize("skill", ["recall to 60", "recall to 700", "recall in chat"])
def test_held_out_facts_are_not_in_training(skill: str) -> None:
    """The last answer of a held-out conversation is in no training conversation of any length."""
    training_text = "\n".join(
        m["content"] for name in recall.SKILLS for c in conversations(Split.TRAIN, name) for m in c.messages
    )
    assert not any(c.messages[-1]["content"] in training_text for c in conversations(Split.HELD_OUT, skill)[:100])


def test_one_value_in_eight_is_always_held_out() -> None:
    held = [n for n in range(1000) if Split.HELD_OUT.owns("pin", n)]
    assert held[:5] == [1, 2, 6, 9, 30]
    assert 100 <= len(held) <= 150
    assert not any(Split.TRAIN.owns("pin", n) for n in held)


@given(wordings=st.lists(st.text(), min_size=5, unique=True), seed=st.integers())
def test_every_wording_is_in_one_split(wordings: list[str], seed: int) -> None:
    rng = Random(seed)
    drawn = {split: {split.wording(rng, wordings) for _ in range(50)} for split in Split}
    assert drawn[Split.TRAIN].isdisjoint(drawn[Split.HELD_OUT])


@pytest.mark.parametrize("skill", ["add", "subtract", "several sums", "times table", "think: sum", "think: product"])
def test_arithmetic_is_correct(skill: str) -> None:
    """Every line of answers and thoughts is a true equation. An answer has the operands of its question."""
    for conversation in conversations(Split.TRAIN, skill):
        question, answer = conversation.messages[-2]["content"], conversation.messages[-1]
        lines = answer["content"].splitlines()
        operands = [n for line in lines for n in re.findall(r"\d+", line.split(" = ")[0])]
        assert sorted(re.findall(r"\d+", question)) == sorted(operands)
        for line in [*lines, *answer.get("reasoning_content", "").splitlines()]:
            left, right = (sum(map(term, re.findall(r"-? ?[\d× ]+", side))) for side in line.split(" = "))
            assert left == right, line


def term(text: str) -> int:
    """Compute the value of a text such as ``12``, ``3 × 4`` or ``- 5``."""
    product = math.prod(int(n) for n in re.findall(r"\d+", text))
    return -product if text.startswith("-") else product


@pytest.mark.parametrize("skill", ["recall to 60", "recall to 200", "recall to 2000"])
def test_recalled_fact_is_in_one_sentence_of_the_passage(skill: str) -> None:
    """One sentence of the passage has every name and number of the answer."""
    checked = 0
    for conversation in conversations(Split.HELD_OUT, skill):
        sentences = re.split(r"[.。]\s*", conversation.messages[0]["content"])
        answer = conversation.messages[-1]["content"]
        marks = set(re.findall(r"\d+|[A-Z][a-z]+", answer)) - {"The"}
        assert any(marks <= set(re.findall(r"\d+|[A-Z][a-z]+", sentence)) for sentence in sentences), answer
        checked += bool(marks)
    assert checked >= 20


@pytest.mark.parametrize("skill", [s for s in corpus.SKILLS if s.startswith("tool")])
def test_tool_calls_match_their_schemas(skill: str) -> None:
    checked = 0
    for conversation in conversations(Split.TRAIN, skill)[:300]:
        offered = {t["function"]["name"]: t["function"]["parameters"] for t in conversation.tools or []}
        for message in conversation.messages:
            for called in message.get("tool_calls", []):
                schema, arguments = offered[called["function"]["name"]], called["function"]["arguments"]
                assert sorted(schema["required"]) == sorted(arguments)
                for name, value in arguments.items():
                    assert isinstance(value, {"string": str, "integer": int}[schema["properties"][name]["type"]])
                checked += 1
    assert checked >= 100


def test_json_answers_match_their_schemas() -> None:
    checked = 0
    for conversation in conversations(Split.TRAIN, "json schema"):
        text = conversation.messages[-2]["content"]
        schema, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
        jsonschema.validate(json.loads(conversation.messages[-1]["content"]), schema)
        checked += 1
    assert checked == 1000


def test_all_skills_but_stories_and_descriptions_are_graded() -> None:
    rng = Random(0)
    open_skills = {s for s in corpus.SKILLS if corpus.converse(rng, Split.HELD_OUT, s).check is Check.FREE}
    assert open_skills == {"story", "description"}
    assert set(corpus.SHARES) == set(corpus.SKILLS)
