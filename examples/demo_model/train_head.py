"""Train an EAGLE-3 head for the demo model (Li et al., 2025). An interrupted training is resumed.

python train_head.py --out build/eagle3     # six minutes of one core

The head learns the chat model's next-token distributions from the hidden states of three layers, and, with EAGLE-3's
training-time test, from its own outputs in place of the model's hidden states, as when it drafts several tokens in
sequence. It shares the model's embedding and language model head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import cast

import corpus
import dataset
import torch
import torch.nn.functional as F
from model import Layer, Model, RMSNorm, from_hugging_face, rotate
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from tqdm import tqdm

from penstock import demo

AUX_LAYERS = (1, 3, 5)
"""Layers of the model whose input (the residual stream) is read by the head."""
UNROLLED = 3
"""Number of successive draft tokens in training."""
MAX_LENGTH = 512
"""Largest number of tokens of the conversations in training."""
PART_TOKENS = 400_000
INTERMEDIATE = 512


class Head(nn.Module):
    """EAGLE-3 head for ``teacher``."""

    def __init__(self, teacher: Model) -> None:
        super().__init__()
        self.s = s = teacher.shape
        self.fc = nn.Linear(len(AUX_LAYERS) * s.hidden, s.hidden, bias=False)
        self.input_norm, self.hidden_norm, self.post_norm = (RMSNorm(s.hidden, s.eps) for _ in range(3))
        self.q = nn.Linear(2 * s.hidden, s.heads * s.head_dim, bias=False)
        self.k = nn.Linear(2 * s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v = nn.Linear(2 * s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.gate = nn.Linear(s.hidden, INTERMEDIATE, bias=False)
        self.up = nn.Linear(s.hidden, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, s.hidden, bias=False)
        self.norm = RMSNorm(s.hidden, s.eps)
        with torch.no_grad():  # start with the last of the states, which is close to the model's final hidden state
            self.fc.weight.zero_()
            self.fc.weight[:, -s.hidden :] = torch.eye(s.hidden)
            self.norm.weight.copy_(teacher.norm.weight)
            for linear in (self.o, self.down):
                nn.init.normal_(linear.weight, std=0.02)

    def qkv(self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[rows, length, heads, head_dim]``."""
        s, shape = self.s, embedded.shape[:2]
        x = torch.cat((self.input_norm(embedded), self.hidden_norm(state)), -1)
        q, k, v = (
            linear(x).view(*shape, heads, s.head_dim)
            for linear, heads in ((self.q, s.heads), (self.k, s.kv_heads), (self.v, s.kv_heads))
        )
        group = s.heads // s.kv_heads
        return (
            rotate(q, cos, sin).to(v.dtype),
            rotate(k, cos, sin).to(v.dtype).repeat_interleave(group, 2),
            (v.repeat_interleave(group, 2)),
        )

    def after(self, state: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after the attention output and the MLP."""
        x = state + self.o(attended.flatten(2))
        h = self.post_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out

    def forward(self, embedded: Tensor, aux: Tensor, cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
        """Yield the states after each unrolled step, ``[rows, length, hidden]``.

        In step k the state at a position is the output of the previous step at the previous position. Its query attends
        to the first step's keys up to k - 1 positions earlier, and to later steps' keys at the positions in between.

        Args:
            embedded: embedding of the *next* token at each position, ``[rows, length, hidden]``.
            aux: the model's hidden states, ``[rows, length, 3 * hidden]``.
        """
        state, length = self.fc(aux), embedded.shape[1]
        keys, values = list[Tensor](), list[Tensor]()
        for step in range(UNROLLED):
            q, k, v = self.qkv(embedded, state, cos, sin)
            keys.append(k)
            values.append(v)
            future = torch.full((length, length), float("-inf"), device=q.device).triu(1 - step)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, keys[0]).float() * self.s.head_dim**-0.5 + future
            own = [_shift(keys[i], step - i) for i in range(1, step + 1)]
            near = [torch.einsum("bqhd,bqhd->bhq", q, key).float()[..., None] * self.s.head_dim**-0.5 for key in own]
            weights = torch.cat((scores, *near), -1).softmax(-1).to(v.dtype)
            attended = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], values[0])
            for i in range(1, step + 1):
                weight = weights[..., length + i - 1].transpose(1, 2)[..., None]
                attended = attended + weight * _shift(values[i], step - i)
            out = self.after(state, attended)
            yield out
            state = _shift(out, 1)


def _shift(x: Tensor, positions: int) -> Tensor:
    """Shift ``[rows, length, ...]`` to later positions; the first ones are zero."""
    return x if not positions else F.pad(x, (*(0, 0) * (x.dim() - 2), positions, 0))[:, : x.shape[1]]


@torch.no_grad()
def teach(teacher: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states of the chat model before ``AUX_LAYERS``, ``[rows, length, 3 * hidden]``, and its final ones."""
    from model import causal_attention

    batch, length = ids.shape
    cos, sin = (table[:length].repeat(batch, 1)[:, None] for table in (teacher.cos, teacher.sin))
    x, aux = teacher.embed(ids.flatten()), []
    for number, layer in enumerate(teacher.layers):
        layer = cast(Layer, layer)
        if number in AUX_LAYERS:
            aux.append(x)
        q, k, v = (t.reshape(batch, length, *t.shape[1:]) for t in layer.before(x, cos, sin))
        x = layer.after(x, causal_attention(q, k, v))
    return torch.cat(aux, -1).view(batch, length, -1), teacher.norm(x).view(batch, length, -1)


def loss_of(head: Head, teacher: Model, ids: Tensor, trained: Tensor) -> tuple[Tensor, list[float]]:
    """Cross-entropy with the model's distributions, averaged over the unrolled steps, and the rate at which the most
    likely token of each step equals the model's."""
    length = ids.shape[1]
    with torch.autocast("cpu", torch.bfloat16):
        aux, last = teach(teacher, ids)
        embedded = teacher.embed(F.pad(ids[:, 1:], (0, 1)))
        rows = F.pad(trained[:, 2:], (0, 2))  # at each position the head predicts the token two positions later
        rows[:, :UNROLLED] = False
        with torch.no_grad():
            wanted = teacher.logits(last[:, 1:][rows[:, :-1]]).float().softmax(-1)
        cos, sin = (table[:length, None] for table in (teacher.cos, teacher.sin))
        losses, right = [], []
        for state in head(embedded, aux, cos, sin):
            logits = teacher.logits(head.norm(state[rows])).float()
            losses.append(-(wanted * logits.log_softmax(-1)).sum(-1).mean())
            right.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean().item())
    return torch.stack(losses).mean(), right


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Infinite sequence of batches of conversations."""
    part = 1000
    while True:
        drawn = dataset.draw(seed, part, PART_TOKENS, corpus.shares_at(1.0), str(demo.CHAT))
        drawn = [each for each in drawn if len(each.ids) <= MAX_LENGTH]
        for ids, trained in dataset.layout(drawn, Random(f"layout:{seed}:{part}")):
            half = max(len(ids) // 2, 1)
            yield torch.from_numpy(ids[:half].astype("int64")), torch.from_numpy(trained[:half])
            if len(ids) > half:
                yield torch.from_numpy(ids[half:].astype("int64")), torch.from_numpy(trained[half:])
        part += 1


def train(out: Path, steps: int, lr: float, seed: int) -> Head:
    """Train the head; resumes from ``out/head.pt`` if it exists."""
    torch.manual_seed(0)
    teacher = from_hugging_face(demo.CHAT).eval().requires_grad_(requires_grad=False)
    head = Head(teacher)
    matrices = [p for p in head.parameters() if p.dim() == 2]
    optimizers: list[Optimizer] = [
        Muon(matrices, lr=lr, weight_decay=0.05),
        AdamW([p for p in head.parameters() if p.dim() == 1], lr=lr / 4, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates, first, saved = [lr, lr / 4], 0, out / "head.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        head.load_state_dict(state["head"])
        for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved_state)
        first = state["step"]
    source = batches(seed)
    for _ in range(first):
        next(source)
    bar = tqdm(range(first, steps), initial=first, total=steps, unit="step")
    for step in bar:
        factor = min((step + 1) / 20, 1.0, 2.0 * (steps - step) / steps)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        loss, right = loss_of(head, teacher, *next(source))
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", right=" ".join(f"{each:.2f}" for each in right), refresh=False)
        if step % 50 == 49 or step == steps - 1:
            state = {
                "head": head.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step + 1,
            }
            torch.save(state, saved.with_suffix(".partial"))
            saved.with_suffix(".partial").replace(saved)
    return head


NAMES = {
    "fc": "fc",
    "norm": "norm",
    "input_norm": "midlayer.input_layernorm",
    "hidden_norm": "midlayer.hidden_norm",
    "post_norm": "midlayer.post_attention_layernorm",
    **{name: f"midlayer.self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def write(head: Head, folder: Path) -> None:
    """Write the head in bfloat16, in the format of published EAGLE-3 heads."""
    s = head.s
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": s.vocab,
        "draft_vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.context,
        "rms_norm_eps": s.eps,
        "rope_theta": s.rope_theta,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"{NAMES[name.removesuffix('.weight')]}.weight": p for name, p in head.named_parameters()}
    save_file({name: p.detach().to(torch.bfloat16) for name, p in tensors.items()}, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/eagle3"), help="folder for the head's checkpoint")
    parser.add_argument("--steps", type=int, default=500, help="steps of about 4,096 tokens (default: 500)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of the matrices (default: 0.02)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the conversations (default: 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    write(train(args.out, args.steps, args.lr, args.seed), args.out)


if __name__ == "__main__":
    main()
