"""Other systems on the same device: eager PyTorch, a static KV cache with ``torch.compile`` (as in gpt-fast), and
transformers, in bfloat16 with random weights."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from roofline import share
from shapes import Model, Scale
from timing import seconds, seconds_of_many
from torch import Tensor, nn

COMPILED_BATCHES = (1, 64)
"""Batch sizes for ``torch.compile``; each one takes half a minute to compile."""


def run(scale: Scale, limits: dict[str, float], model_name: str) -> dict[str, Any]:
    model = next(each for each in scale.models if each.name == model_name)
    device = torch.device(scale.device)
    rows: list[dict[str, Any]] = []
    for name, time_them in (("PyTorch eager", eager), ("torch.compile", compiled), ("transformers", transformers)):
        try:
            for work, each, tokens in time_them(model, scale, device):
                rows.append({"system": name, "model": model.name, "work": work, "milliseconds": each * 1e3})
                kind, size = work.split()
                context, count = scale.context, int(size)
                if kind == "decode":
                    flops = model.flops(count, count * context, count)
                    moved = model.weight_bytes("bf16", count) + model.kv_bytes(count * context)
                else:
                    flops = model.flops(count, count * (count + 1) // 2, 1)
                    moved = model.weight_bytes("bf16", count) + 2 * model.kv_bytes(count)
                rows[-1] |= share(limits, "bf16", flops, moved, each, tokens / each)
        except Exception as error:
            rows.append({"system": name, "model": model.name, "failure": f"{type(error).__name__}: {error}"[-1500:]})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": rows}


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Layer(nn.Module):
    """Decoder layer with a static KV cache."""

    def __init__(self, model: Model, batch: int, length: int) -> None:
        super().__init__()
        self.model = model
        self.qkv = nn.Linear(model.hidden, (model.heads + 2 * model.kv_heads) * model.head_dim, bias=False)
        self.out = nn.Linear(model.heads * model.head_dim, model.hidden, bias=False)
        self.gate_up = nn.Linear(model.hidden, 2 * model.inter, bias=False)
        self.down = nn.Linear(model.inter, model.hidden, bias=False)
        self.first, self.second = Norm(model.hidden), Norm(model.hidden)
        self.q_norm = self.k_norm = nn.Identity()
        if model.kind == "qwen3":
            self.q_norm, self.k_norm = Norm(model.head_dim), Norm(model.head_dim)
        shape = (batch, model.kv_heads, length, model.head_dim)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, x: Tensor, at: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        model = self.model
        batch, tokens, _ = x.shape
        heads = self.qkv(self.first(x)).view(batch, tokens, -1, model.head_dim).transpose(1, 2)
        q, k, v = heads.split((model.heads, model.kv_heads, model.kv_heads), 1)
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        self.keys[:, :, at], self.values[:, :, at] = k, v
        if mask is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation.chunk(2, -1)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Decoder(nn.Module):
    """Decoder like gpt-fast's: a static KV cache, a mask, and the argmax of the last token."""

    def __init__(self, model: Model, batch: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(Layer(model, batch, length) for _ in range(model.layers))
        self.norm = Norm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        angles = torch.outer(
            torch.arange(length), model.theta ** -(torch.arange(0, model.head_dim, 2) / model.head_dim)
        )
        self.register_buffer("rotations", torch.cat((angles.cos(), angles.sin()), -1))
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, token_ids: Tensor, at: Tensor, decodes: bool) -> Tensor:
        x, rotation = self.embedding(token_ids), self.rotations[at]
        mask = self.mask[None, None, at] if decodes else None
        for layer in self.layers:
            x = layer(x, at, rotation, mask)
        return self.head(self.norm(x[:, -1:])).argmax(-1)


def decoder(model: Model, batch: int, length: int, scale: Scale, device: torch.device) -> Decoder:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, scale.dtype))
    try:
        with device:
            return Decoder(model, batch, length).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(dtype)


Timed = list[tuple[str, float, int]]
"""For each work: name, seconds per call, and number of tokens per call."""


@torch.inference_mode()
def eager(model: Model, scale: Scale, device: torch.device) -> Timed:
    found: Timed = []
    for length in scale.prompts:
        one = decoder(model, 1, length, scale, device)
        ids, at = torch.zeros(1, length, dtype=torch.int64, device=device), torch.arange(length, device=device)
        found.append(
            (f"prefill {length}", seconds(lambda one=one, ids=ids, at=at: one(ids, at, False), device, 3), length)
        )
        del one
    return found + _decodes(model, scale, device, scale.batches, lambda one: one)


@torch.inference_mode()
def compiled(model: Model, scale: Scale, device: torch.device) -> Timed:
    batches = tuple(batch for batch in COMPILED_BATCHES if batch in scale.batches)

    def compile_it(one: Decoder) -> Any:
        torch._dynamo.reset()
        return one if scale.interpret else torch.compile(one, mode="reduce-overhead", fullgraph=True, dynamic=False)

    return _decodes(model, scale, device, batches, compile_it)


def _decodes(model: Model, scale: Scale, device: torch.device, batches: tuple[int, ...], prepare: Any) -> Timed:
    found: Timed = []
    for batch in batches:
        one = decoder(model, batch, scale.context + 64, scale, device)
        step = prepare(one)
        ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        at = torch.tensor([scale.context], device=device)
        for _ in range(3):
            step(ids, at, True)
        each = seconds_of_many(
            lambda step=step, ids=ids, at=at: step(ids, at, True), device, 1 if scale.interpret else 10
        )
        found.append((f"decode {batch}", each, batch))
        del one, step
    return found


@torch.inference_mode()
def transformers(model: Model, scale: Scale, device: torch.device) -> Timed:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = model.config()
    with device:
        one = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config), dtype=getattr(torch, scale.dtype)
        ).eval()
    found: Timed = []
    for batch in (b for b in scale.batches if b <= 64):
        ids = torch.ones(batch, scale.context, dtype=torch.int64, device=device)

        def generate(tokens: int, ids: Tensor = ids) -> float:
            begun = time.perf_counter()
            settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            one.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begun

        generate(2)
        short, long = generate(1), generate(1 + scale.steps)
        found.append((f"decode {batch}", (long - short) / scale.steps, batch))
    return found
