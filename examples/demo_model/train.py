"""Train the demo model in stages: ``corpus``, ``target``, ``chat``, ``draft``, ``package``. Interrupted stages resume.

python train.py all --out build     # all stages, under three hours on two cores
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import dataset
import matplotlib
import tokenizer as bpe
import torch
import torch.nn.functional as F
from evaluate import weights_digest
from model import DRAFT, TARGET, Model, Shape, from_hugging_face, to_hugging_face
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from tqdm import tqdm
from transformers import AutoTokenizer

from penstock import demo

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training. A step is one batch of ``dataset.BATCH_TOKENS`` tokens, including padding."""

    shape: Shape
    matrix_lr: float = 0.02
    other_lr: float = 5e-3
    weight_decay: float = 0.1
    warmup: float = 0.03
    cooldown: float = 0.25
    corpus: str = "curriculum"
    """Folder of the corpus: ``curriculum``, or ``refining``, which continues it."""
    start: float = 0.0
    """Fraction of the corpus to skip; the draft model needs only the last part."""
    begins_from: str = ""
    """Model with the initial weights; empty: random weights."""

    def rate(self, progress: float) -> float:
        """Learning rate factor: linear warmup, inverse square root (Vaswani et al., 2017), and linear decay to zero.

        The rate decreases early because gradients of small batches are noisy.
        """
        rise, slope = progress / self.warmup, math.sqrt(self.warmup / progress)
        return min(rise, slope, slope * (1 - progress) / self.cooldown)


RECIPES = {
    "target": Recipe(TARGET),
    # Continues training the target model at the learning rate at which its decay began, on a corpus with more of the
    # weak skills.
    "chat": Recipe(TARGET, 5e-3, 1.25e-3, warmup=0.1, cooldown=0.7, corpus="refining", begins_from="target"),
    "draft": Recipe(DRAFT, start=0.85),
}


class Run:
    """Training run, with its resumable state in ``folder``."""

    def __init__(
        self, name: str, recipe: Recipe, folder: Path, made_of: str, compiled: bool, begin: Model | None = None
    ) -> None:
        torch.manual_seed(0)
        self.recipe, self.made_of = recipe, f"{recipe} {made_of}"
        self.checkpoint = folder / f"{name}.pt"
        self.model = (begin or Model(recipe.shape)).to(DEVICE)
        matrices = [p for p in self.model.layers.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        self.optimizers: list[Optimizer] = [
            # Muon (Jordan et al., 2024) on the matrices needs about half as many tokens as AdamW for these skills.
            Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay),
            AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step = 0
        self.losses: list[float] = []
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, map_location=DEVICE, weights_only=True)
            if state["made_of"] != self.made_of:
                raise SystemExit(f"{self.checkpoint} has another recipe or corpus: delete it, or use another --out")
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.losses = state["step"], state["losses"]
        if compiled:
            self.model.compile_regions()

    def save(self) -> None:
        """Write the checkpoint atomically."""
        partial = self.checkpoint.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "losses": self.losses,
            "made_of": self.made_of,
        }
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def train(self, batches: dataset.Batches, loss_of: Callable[[Model], Loss], save_every: float = 300) -> None:
        first = int(len(batches) * self.recipe.start)
        steps, loss_at, saved = len(batches) - first, loss_of(self.model), time.monotonic()
        bar = tqdm(range(self.step, steps), initial=self.step, total=steps, unit="step", smoothing=0.02)
        for step in bar:
            factor = self.recipe.rate((step + 1) / steps)
            for optimizer, lr in zip(self.optimizers, (self.recipe.matrix_lr, self.recipe.other_lr), strict=True):
                optimizer.param_groups[0]["lr"] = lr * factor
            begun = time.monotonic()
            ids, trained = (torch.from_numpy(array).to(DEVICE) for array in batches[first + step])
            loss = loss_at(ids, trained)
            torch.autograd.backward(loss)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.step = step + 1
            rate = ids.numel() / (time.monotonic() - begun)
            self.losses.append(loss.item())
            recent = self.losses[-50:]
            bar.set_postfix(loss=f"{sum(recent) / len(recent):.3f}", tok_s=f"{rate:.0f}", refresh=False)
            if time.monotonic() - saved > save_every or self.step == steps:
                self.save()
                self.plot()
                saved = time.monotonic()

    def plot(self) -> None:
        """Draw the loss (mean over 25 steps) as ``<name>.png``."""
        losses = torch.tensor(self.losses)
        window = min(25, len(losses))
        smooth = losses.unfold(0, window, 1).mean(1)
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        axes.semilogy(range(window, len(losses) + 1), smooth)
        axes.set(xlabel="step (8,192 tokens)", ylabel="loss (nats per trained token)", title=self.checkpoint.stem)
        axes.grid(True, which="both", alpha=0.3)
        figure.savefig(self.checkpoint.with_suffix(".png"), dpi=120)
        plt.close(figure)


def answers(trained: Tensor) -> Tensor:
    """Mask of the flat hidden states that predict a trained token: those at the previous position."""
    return F.pad(trained[:, 1:], (0, 1)).flatten()


def likelihood(model: Model) -> Loss:
    """Cross-entropy loss of the conversations' answers."""

    def loss(ids: Tensor, trained: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            scores = model.logits(model(ids)[answers(trained)])
        return F.cross_entropy(scores.float(), ids[trained])

    return loss


def distillation(teacher: Model) -> Callable[[Model], Loss]:
    """Kullback-Leibler divergence from the teacher's next-token distribution (Hinton et al., 2015)."""

    def loss_of(model: Model) -> Loss:
        def loss(ids: Tensor, trained: Tensor) -> Tensor:
            rows = answers(trained)
            with torch.autocast(DEVICE, torch.bfloat16):
                with torch.no_grad():
                    wanted = teacher.logits(teacher(ids)[rows]).float().log_softmax(-1)
                scores = model.logits(model(ids)[rows])
            return F.kl_div(scores.float().log_softmax(-1), wanted, reduction="batchmean", log_target=True)

        return loss

    return loss_of


STAGES = ("corpus", "target", "chat", "draft", "package")


def make_corpus(out: Path, tokens: int, seed: int) -> None:
    made, options = out / "corpus.json", {"tokens": tokens, "seed": seed}
    if not made.exists():
        dataset.train_tokenizer(out / "target", TARGET.context, seed)
        dataset.write(out / "curriculum", out / "target", tokens, seed)
        dataset.write(out / "refining", out / "target", tokens, seed, dataset.REFINING)
        made.write_text(json.dumps(options))
    if json.loads(made.read_text()) != options:
        raise SystemExit(f"the corpus in {out} was created with other options: delete it, or use another --out")


def train_model(name: str, out: Path, compiled: bool) -> None:
    """Train ``target``, ``chat`` or ``draft`` on its corpus and write the checkpoint to ``out/name``."""
    recipe = RECIPES[name]
    batches = dataset.Batches(out / recipe.corpus)
    loss_of: Callable[[Model], Loss] = likelihood
    made_of, begin = batches.digest(), None
    if recipe.begins_from:
        begin = from_hugging_face(out / recipe.begins_from)
        made_of += weights_digest(out / recipe.begins_from)
    if name == "draft":
        teacher = from_hugging_face(out / "chat").to(DEVICE)
        if compiled:
            teacher.compile_regions()
        loss_of = distillation(teacher)
        made_of += weights_digest(out / "chat")
    run = Run(name, recipe, out, made_of, compiled, begin)
    run.train(batches, loss_of)
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    to_hugging_face(run.model, out / name, tokenizer.eos_token_id, tokenizer.pad_token_id)
    bpe.save(tokenizer, out / name)


def package(out: Path) -> None:
    """Copy checkpoints and model card into the package, and the loss charts next to this file."""
    here = Path(__file__).parent
    shutil.copy(here / "model_card.md", demo.CHAT / "README.md")
    for name, folder in (("chat", demo.CHAT), ("draft", demo.DRAFT)):
        shutil.copytree(out / name, folder, dirs_exist_ok=True)
    for name in RECIPES:
        shutil.copy(out / f"{name}.png", here / f"loss-{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for results (default: build)")
    parser.add_argument("--tokens", type=float, default=dataset.TOKENS, help="tokens of the corpus (default: 44e6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the corpus (default: 0)")
    about = "do not use torch.compile: needs no C++ compiler, but takes twice as long"
    parser.add_argument("--no-compile", action="store_true", help=about)
    args = parser.parse_args()
    for stage in STAGES if args.stage == "all" else (args.stage,):
        if stage == "corpus":
            make_corpus(args.out, int(args.tokens), args.seed)
        elif stage == "package":
            package(args.out)
        else:
            train_model(stage, args.out, not args.no_compile)


if __name__ == "__main__":
    main()
