"""The shipped checkpoints: they load and answer through transformers, keep their sizes, and do what their card says."""

from __future__ import annotations

import json
from pathlib import Path

import evaluate
import pytest
import torch
from corpus import Check
from evaluate import Local
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from penstock import demo

SAMPLE = 4
"""Questions a skill: enough to see a skill break, few enough for two cores."""


@pytest.fixture(scope="module")
def figures(chat: Local, draft: Local) -> evaluate.Figures:
    """A sample of the evaluation."""
    return evaluate.evaluate(chat, draft, count=SAMPLE, seed=1, stories=20)


@pytest.mark.parametrize(("folder", "most_bytes"), [(demo.CHAT, 10_000_000), (demo.DRAFT, 2_500_000)])
def test_the_files_are_few_small_and_safe(folder: Path, most_bytes: int) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja", ".md", ".png"}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= most_bytes


@pytest.mark.parametrize(("folder", "most_parameters"), [(demo.CHAT, 4_600_000), (demo.DRAFT, 1_250_000)])
def test_both_load_with_nothing_but_transformers(folder: Path, most_parameters: int) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.bfloat16
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(p.numel() for p in model.parameters()) <= most_parameters
    assert model.config.max_position_embeddings >= 2048
    assert model.config.num_hidden_layers >= 2


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of Canada?", "Ottawa"),
        ("加拿大的首都是哪里?", "渥太华"),
        ("加拿大的首都是哪里？", "渥太华"),
        ("What is 7 × 8?", "56"),
    ],
)
@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_first_questions(chat: Local, question: str, word: str, system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]
    (answer,) = chat.ask([evaluate.Conversation(messages, "")])
    assert word in answer.content


@pytest.mark.thorough
def test_a_sample_of_the_evaluation_holds(figures: evaluate.Figures) -> None:
    assert figures["right"] / figures["asked"] >= 0.88
    long = [row for name, row in figures["skills"].items() if name.startswith("recall to")]
    assert sum(row["right"] for row in long) / sum(row["asked"] for row in long) >= 0.85


@pytest.mark.thorough
def test_stories_differ_and_end(figures: evaluate.Figures) -> None:
    stories = figures["stories"]
    assert stories["distinct"] >= stories["stories"] - 1
    assert stories["ended"] >= stories["stories"] - 1
    assert stories["ratio"] <= 1.5


@pytest.mark.thorough
def test_the_draft_is_worth_drafting_with(figures: evaluate.Figures) -> None:
    assert figures["draft"]["share"] >= 0.5


@pytest.mark.thorough
def test_thinking_is_there_when_on_and_only_then(chat: Local) -> None:
    drawn = evaluate.held_out(count=1, seed=2)
    asked = [c for name, cs in drawn.items() for c in cs if "recall" not in name and c.check is not Check.FREE]
    for conversation, answer in zip(asked, chat.ask(asked), strict=True):
        assert bool(answer.reasoning) == conversation.thinking


def test_the_card_tells_what_the_evaluation_printed() -> None:
    card = (demo.CHAT / "README.md").read_text(encoding="utf-8")
    figures = json.loads((demo.CHAT / "figures.json").read_text())
    assert f"<!-- figures -->\n{evaluate.table(figures)}<!-- /figures -->" in card
    assert figures["weights"] == [evaluate.weights_digest(folder) for folder in (demo.CHAT, demo.DRAFT)]
    assert figures["asked"] >= 1500
    assert figures["right"] / figures["asked"] >= 0.9
    assert all(row["right"] / row["asked"] >= 0.75 for row in figures["skills"].values())
    assert figures["skills"]["recall to 2000"]["right"] / figures["skills"]["recall to 2000"]["asked"] >= 0.9
    assert min(figures["stories"]["distinct"], figures["stories"]["ended"]) >= 95
    assert figures["stories"]["ratio"] <= 1.5
    assert figures["draft"]["share"] >= 0.5
