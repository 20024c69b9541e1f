"""Qwen3 implementation for training on two CPU cores, with conversion from and to Hugging Face checkpoints.

The arithmetic is that of ``transformers.Qwen3ForCausalLM`` (tests compare both), but a step takes half the time. The
layers between two attention calls work on a flat ``[tokens, hidden]`` array, so that they compile to one fused region
for all batch shapes. Attention computes the causal triangle in chunks of queries; at these sizes,
``scaled_dot_product_attention`` spends most of its time outside of matrix products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model. ``hidden == heads * head_dim`` is not required."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    context: int = 2048
    rope_theta: float = 10_000.0
    eps: float = 1e-6


REGION = 8192
"""Number of tokens of the compiled regions; batches are padded to a multiple."""

TARGET = Shape(vocab=3584, hidden=256, intermediate=512, layers=6, heads=4, kv_heads=2)
DRAFT = Shape(vocab=3584, hidden=128, intermediate=320, layers=3, heads=2, kv_heads=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention over whole sequences.

    Args:
        q: ``[batch, length, heads, head_dim]``.
        k, v: ``[batch, length, kv_heads, head_dim]``.

    Returns:
        ``[batch * length, heads * head_dim]``, in the inputs' dtype.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    q = (
        q.view(batch, length, kv_heads, group, dim)
        .permute(0, 2, 1, 3, 4)
        .reshape(batch * kv_heads, length * group, dim)
    )
    k = k.transpose(1, 2).reshape(batch * kv_heads, length, dim)
    v = v.transpose(1, 2).reshape(batch * kv_heads, length, dim)
    chunk = 128 if length <= 512 else 256  # the fastest of 64, 128 and 256 on these CPUs
    outputs = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        future = torch.full((end - start, end), float("-inf"), dtype=q.dtype, device=q.device).triu(1 + start)
        future = future.repeat_interleave(group, 0).expand(batch * kv_heads, -1, -1)
        rows = q[:, start * group : end * group]
        scores = torch.baddbmm(future, rows, k[:, :end].transpose(1, 2), alpha=dim**-0.5)
        outputs.append(torch.bmm(scores.softmax(-1), v[:, :end]))
    out = torch.cat(outputs, 1).view(batch, kv_heads, length, group, dim)
    return out.permute(0, 2, 1, 3, 4).reshape(batch * length, heads * dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) of the two halves of a head; ``x`` is ``[tokens, heads, head_dim]``."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.input_norm = RMSNorm(s.hidden, s.eps)
        self.q = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.eps)
        self.k_norm = RMSNorm(s.head_dim, s.eps)
        self.o = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.post_norm = RMSNorm(s.hidden, s.eps)
        self.gate = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down = nn.Linear(s.intermediate, s.hidden, bias=False)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``x`` ``[tokens, hidden]``."""
        s, h = self.s, self.input_norm(x)
        q = self.q_norm(self.q(h).unflatten(-1, (s.heads, s.head_dim)))
        k = self.k_norm(self.k(h).unflatten(-1, (s.kv_heads, s.head_dim)))
        v = self.v(h).unflatten(-1, (s.kv_heads, s.head_dim))
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after the attention output and the MLP."""
        x = x + self.o(attended)
        h = self.post_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Model(nn.Module):
    """Decoder with tied embeddings; ``forward`` returns final hidden states, ``logits`` the logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.compiled = False
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.context).float(), shape.rope_theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if name.endswith(("o.weight", "down.weight")):
                nn.init.normal_(weight, std=(2 * shape.layers * shape.hidden) ** -0.5)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=shape.hidden**-0.5)
        plant_induction(self)

    def compile_regions(self) -> None:
        """Compile the regions between attentions, once for all layers and batch shapes."""
        self.compiled = True
        for layer in self.layers:
            for region in ("before", "after"):
                setattr(layer, region, torch.compile(getattr(layer, region), dynamic=False))

    def forward(self, ids: Tensor) -> Tensor:
        """Compute hidden states ``[batch * length, hidden]`` float32 of token ids ``[batch, length]`` int64."""
        batch, length = ids.shape
        tokens = batch * length
        padding = -tokens % REGION if self.compiled else 0
        cos = F.pad(self.cos[:length].repeat(batch, 1), (0, 0, 0, padding))[:, None]
        sin = F.pad(self.sin[:length].repeat(batch, 1), (0, 0, 0, padding))[:, None]
        x: Tensor = self.embed(F.pad(ids.flatten(), (0, padding)))
        for layer in cast(Iterable[Layer], self.layers):
            q, k, v = (t[:tokens].reshape(batch, length, *t.shape[1:]) for t in layer.before(x, cos, sin))
            x = layer.after(x, F.pad(causal_attention(q, k, v), (0, 0, 0, padding)))
        return cast(Tensor, self.norm(x[:tokens]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of hidden states ``[rows, hidden]``."""
        return F.linear(hidden, self.embed.weight)


@torch.no_grad()
def plant_induction(model: Model) -> None:
    """Initialize the model with a working induction head (Olsson et al., 2022).

    Recall, extraction and tool arguments depend on looking up what followed an earlier occurrence of the current token.
    This needs two heads in successive layers: one in the first layer attends to the previous token and stores it; one
    in the second layer finds the position whose stored token is the current token, and copies the token at that
    position. Training finds them late (here not within 14 million tokens), so their weights are set initially, and
    refined by training.

    The embeddings get a common component, so that the first head's queries and keys depend only on positions. Three
    orthogonal subspaces store the current token, the previous one, and the one to copy.
    """
    s, first, second = model.shape, model.layers[0], model.layers[1]
    assert isinstance(first, Layer)
    assert isinstance(second, Layer)
    common = F.normalize(torch.randn(s.hidden), dim=0)
    model.embed.weight.normal_(std=0.5).add_(0.5 * s.hidden**0.5 * common)
    model.norm.weight.fill_(0.05)  # otherwise the large embeddings would give extreme logits
    basis = torch.linalg.qr(torch.cat((common[:, None], torch.randn(s.hidden, s.hidden - 1)), 1))[0].T[1:]
    rank = min(s.head_dim, (s.hidden - 1) // 3)
    current, previous, copied = basis[:rank], basis[rank : 2 * rank], basis[2 * rank : 3 * rank]
    head, half = slice(s.head_dim), s.head_dim // 2
    for layer in (first, second):
        layer.q_norm.weight.fill_(2.0)  # attention sharp enough to look up a single position
        layer.k_norm.weight.fill_(2.0)

    # In the fastest frequencies, queries are rotated by one position relative to keys, so attention peaks at the
    # previous token.
    speeds = s.rope_theta ** -(torch.arange(half) / half)
    fast, phase = (torch.arange(half) < 8).float(), 2 * torch.pi * torch.rand(half)
    key = torch.cat((fast * phase.cos(), fast * phase.sin()))
    query = torch.cat((fast * (phase - speeds).cos(), fast * (phase - speeds).sin()))
    first.k.weight[head], first.q.weight[head] = torch.outer(key, common), torch.outer(query, common)
    first.v.weight[:rank], first.o.weight[:, :rank] = current, 2 * previous.T

    # Content is matched in the slowest frequencies, which hardly rotate within the context.
    slow = torch.arange(half - min(12, rank // 2), half)
    second.k.weight[head], second.q.weight[head] = 0.0, 0.0
    for rows, matched in ((slow, slice(0, len(slow))), (slow + half, slice(len(slow), 2 * len(slow)))):
        second.k.weight[rows], second.q.weight[rows] = previous[matched], current[matched]
    second.v.weight[:rank], second.o.weight[:, :rank] = copied, 2 * copied.T


def to_hugging_face(model: Model, folder: Path, end: int, pad: int) -> None:
    """Save ``model`` as a ``Qwen3ForCausalLM`` checkpoint in bfloat16.

    Args:
        end: token id that ends a turn.
        pad: token id of padding, also an EOS token.
    """
    s = model.shape
    config = Qwen3Config(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=s.context,
        rms_norm_eps=s.eps,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    library = Qwen3ForCausalLM(config).to(torch.bfloat16)
    missing, unexpected = library.load_state_dict(_library_names(model), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the weights do not fit Qwen3ForCausalLM: {missing=}, {unexpected=}")
    library.tie_weights()
    library.generation_config = GenerationConfig(
        eos_token_id=[end, pad], pad_token_id=pad, do_sample=True, temperature=0.4, top_k=20, top_p=0.95
    )
    library.save_pretrained(folder)


def from_hugging_face(folder: Path) -> Model:
    """Load a checkpoint written by ``to_hugging_face``, in float32."""
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    c = library.config
    shape = Shape(
        vocab=c.vocab_size,
        hidden=c.hidden_size,
        intermediate=c.intermediate_size,
        layers=c.num_hidden_layers,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        context=c.max_position_embeddings,
        rope_theta=c.rope_parameters["rope_theta"],
        eps=c.rms_norm_eps,
    )
    model, weights = Model(shape), library.state_dict()
    ours = {theirs: name for name, theirs in _names(model).items()}
    model.load_state_dict({ours[name]: weight for name, weight in weights.items() if name in ours})
    return model


PARTS = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def _names(model: Model) -> dict[str, str]:
    """Parameter names in transformers by name in ``model``."""
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    for i in range(model.shape.layers):
        names |= {f"layers.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight" for ours, theirs in PARTS.items()}
    return names


def _library_names(model: Model) -> dict[str, Tensor]:
    names = _names(model)
    return {names[name]: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}
