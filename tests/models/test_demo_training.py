"""Training the demo model: the model matches transformers, and an interrupted run resumes with the same losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dataset
import pytest
import torch
import train
import train_head
from model import DRAFT, TARGET, Model, Shape, from_hugging_face, to_hugging_face
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams, demo

SMALL = train.Recipe(Shape(vocab=3584, hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1, head_dim=32))


@pytest.mark.parametrize("shape", [TARGET, DRAFT])
def test_training_model_matches_transformers(shape: Shape, tmp_path: Path) -> None:
    """Compares with ``Qwen3ForCausalLM`` with the same weights, in float32, over several chunks."""
    torch.manual_seed(0)
    to_hugging_face(Model(shape), tmp_path, end=3577, pad=3575)
    ids = torch.randint(shape.vocab, (2, 700))
    ours, library = from_hugging_face(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        scores = ours.logits(ours(ids)).view(2, 700, -1)
        torch.testing.assert_close(scores, library(ids).logits, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("shape", [TARGET, DRAFT])
def test_planted_induction_head_copies_before_training(shape: Shape) -> None:
    """When a random sequence is repeated, the next token of its first occurrence has a high rank (by chance: 1,792)."""
    torch.manual_seed(0)
    model = Model(shape)
    tokens = torch.randint(shape.vocab, (1, 100))
    scores = model.logits(model(torch.cat((tokens, tokens), 1)))[100:199]
    ranks = (scores > scores.gather(1, tokens[0, 1:, None])).sum(1)
    assert ranks.float().median() < 200


class Stopped(Exception):
    """Exception that interrupts a training run."""


@pytest.mark.thorough
def test_interrupted_run_resumes_with_the_same_losses(tmp_path: Path) -> None:
    dataset.write(tmp_path / "corpus", demo.CHAT, tokens=60_000, seed=1, parts=range(2))
    batches = dataset.Batches(tmp_path / "corpus")
    batches.index = batches.index[:4]

    def run(name: str) -> train.Run:
        return train.Run(name, SMALL, tmp_path, "this corpus", compiled=False)

    def stopping(model: Model) -> train.Loss:
        calls = iter(range(2))
        loss = train.likelihood(model)

        def stop(ids: Tensor, trained: Tensor) -> Tensor:
            if next(calls, None) is None:
                raise Stopped
            return loss(ids, trained)

        return stop

    whole, halved = run("whole"), run("halved")
    whole.train(batches, train.likelihood)
    with pytest.raises(Stopped):
        halved.train(batches, stopping, save_every=0)
    resumed = run("halved")
    assert resumed.step == 2
    resumed.train(batches, train.likelihood)
    assert resumed.losses == whole.losses
    assert (tmp_path / "halved.png").stat().st_size > 0
    with pytest.raises(SystemExit, match="another recipe or corpus"):
        train.Run("halved", SMALL, tmp_path, "another corpus", compiled=False)


@pytest.mark.thorough
def test_draft_head_trained_in_two_runs_generates_drafts(tmp_path: Path) -> None:
    """The folder has the layout that ``speculative_config`` reads."""
    script = [sys.executable, train_head.__file__, "--out", str(tmp_path), "--steps"]
    for steps in ("2", "3"):
        subprocess.run([*script, steps], check=True, capture_output=True)
    assert torch.load(tmp_path / "head.pt", weights_only=True)["step"] == 3
    question, params = [{"role": "user", "content": "Tell me a story."}], SamplingParams(temperature=0, max_tokens=40)
    options = {"num_gpu_blocks_override": 100, "max_model_len": 512}
    drafting = LLM(speculative_config={"model": str(tmp_path), "adaptive": False}, **options)
    plain, drafted = (llm.chat(question, params, use_tqdm=False)[0].outputs for llm in (LLM(**options), drafting))
    assert drafted == plain
    assert drafting.engine.scheduler.speculation.stats.draft_tokens > 0
