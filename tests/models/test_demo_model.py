"""The shipped checkpoints: they load and answer with transformers, stay small, and match their model card."""

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
"""Number of questions per skill: enough to detect a broken skill, and few enough for two cores."""


@pytest.fixture(scope="module")
def figures(chat: Local, draft: Local) -> evaluate.Figures:
    """Results of the evaluation on a sample of its questions."""
    return evaluate.evaluate(chat, draft, count=SAMPLE, seed=1, stories=20)


@pytest.mark.parametrize(("folder", "max_bytes"), [(demo.CHAT, 10_000_000), (demo.DRAFT, 2_500_000)])
def test_checkpoint_files_are_few_small_and_safe(folder: Path, max_bytes: int) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja", ".md", ".png"}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= max_bytes


@pytest.mark.parametrize(("folder", "max_parameters"), [(demo.CHAT, 4_600_000), (demo.DRAFT, 1_250_000)])
def test_checkpoint_loads_with_transformers(folder: Path, max_parameters: int) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.bfloat16
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(p.numel() for p in model.parameters()) <= max_parameters
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
def test_example_question_is_answered(chat: Local, question: str, word: str, system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]
    (answer,) = chat.ask([evaluate.Conversation(messages, "")])
    assert word in answer.content


@pytest.mark.thorough
def test_sample_of_the_evaluation_is_answered_correctly(figures: evaluate.Figures) -> None:
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
def test_at_least_half_of_the_draft_tokens_are_accepted(figures: evaluate.Figures) -> None:
    assert figures["draft"]["share"] >= 0.5


@pytest.mark.thorough
def test_answer_has_reasoning_only_if_thinking_is_on(chat: Local) -> None:
    drawn = evaluate.held_out(count=1, seed=2)
    questions = [c for name, cs in drawn.items() for c in cs if "recall" not in name and c.check is not Check.FREE]
    for conversation, answer in zip(questions, chat.ask(questions), strict=True):
        assert bool(answer.reasoning) == conversation.thinking


def test_model_card_has_the_figures_of_the_evaluation() -> None:
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
