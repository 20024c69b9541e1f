"""Random configurations of models with recurrent state, and their checkpoints of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from checkpoints import save
from families import VOCABULARY, experts, flag, sizes
from safetensors.torch import load_file, save_file
from transformers import (
    KimiLinearConfig,
    MiniMaxConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)


def layer_types(rng: Random, count: int, *kinds: str) -> list[str]:
    """A random kind for each layer; each kind occurs."""
    drawn = [*kinds, *rng.choices(kinds, k=count - len(kinds))]
    rng.shuffle(drawn)
    return drawn


def delta_net(rng: Random, num_layers: int) -> dict[str, Any]:
    """Kinds of layers, and sizes of gated delta nets."""
    key_heads = rng.choice((1, 2, 4))
    return {
        "layer_types": layer_types(rng, num_layers, "linear_attention", "full_attention"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice((1, 2, 3)),
        "linear_key_head_dim": rng.choice((8, 16, 32)),
        "linear_value_head_dim": rng.choice((8, 16, 24)),
        "linear_conv_kernel_dim": rng.choice((2, 4)),
    }


def shared_experts(rng: Random) -> dict[str, Any]:
    return {
        **experts(rng),
        "moe_intermediate_size": rng.choice((24, 32, 64)),
        "shared_expert_intermediate_size": rng.choice((40, 64)),
    }


def qwen3_next(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    net = delta_net(rng, given["num_hidden_layers"])
    dense = rng.choice(([], [1]))
    return Qwen3NextConfig(**given, **shared_experts(rng), **net, mlp_only_layers=dense, attention_bias=flag(rng))


def qwen3_5(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    return Qwen3_5TextConfig(**given, **delta_net(rng, given["num_hidden_layers"]), attention_bias=flag(rng))


def qwen3_5_moe(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    given.pop("intermediate_size")
    net = delta_net(rng, given["num_hidden_layers"])
    return Qwen3_5MoeTextConfig(**given, **shared_experts(rng), **net, attention_bias=flag(rng))


def olmo_hybrid(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    given["rope_parameters"] = {"rope_type": "default", "rope_theta": rng.choice((None, 10_000.0))}
    net = delta_net(rng, given["num_hidden_layers"])
    return OlmoHybridConfig(**given, **net, linear_allow_neg_eigval=flag(rng), attention_bias=flag(rng))


def kimi_linear(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    layers, given["num_key_value_heads"] = given["num_hidden_layers"], given["num_attention_heads"]
    groups, top_groups = rng.choice(((1, 1), (2, 1), (4, 2)))
    return KimiLinearConfig(
        **given,
        layer_types=layer_types(rng, layers, "linear_attention", "full_attention"),
        mlp_layer_types=layer_types(rng, layers, "dense", "sparse"),
        kv_lora_rank=rng.choice((32, 64)),
        q_lora_rank=rng.choice((None, 48)),
        qk_rope_head_dim=rng.choice((16, 32)),
        qk_nope_head_dim=rng.choice((16, 32)),
        v_head_dim=rng.choice((16, 32)),
        num_local_experts=rng.choice((8, 16)),
        num_experts_per_tok=rng.choice((1, 2, 4)),
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=flag(rng),
        moe_intermediate_size=rng.choice((24, 32, 64)),
        n_shared_experts=rng.choice((1, 2)),
        attention_bias=flag(rng),
        linear_head_dim=rng.choice((8, 16, 24, 32)),
        linear_num_heads=rng.choice((2, 4)),
        linear_conv_kernel_dim=rng.choice((2, 4)),
    )


def minimax(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    factors = ("full_attn_alpha", "full_attn_beta", "linear_attn_alpha", "linear_attn_beta", "mlp_alpha", "mlp_beta")
    return MiniMaxConfig(
        **given,
        **{f"{name}_factor": rng.choice((1, 0.5, 3.5)) for name in factors},
        layer_types=layer_types(rng, given["num_hidden_layers"], "linear_attention", "full_attention"),
        num_local_experts=rng.choice((5, 8)),
        num_experts_per_tok=rng.choice((1, 2, 4)),
        sliding_window=rng.choice((None, 100)),
        block_size=rng.choice((32, 256)),
    )


def split_convolutions(config: PreTrainedConfig, path: Path) -> None:
    """Split convolutions at the sizes of queries, keys and values, as in published checkpoints: ``save_pretrained``
    splits them into three equal parts."""
    tensors = load_file(path)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for first in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split([keys, keys, values])
        tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, path)


FAMILIES: dict[str, Callable[[Random], PreTrainedConfig]] = {
    "Qwen3Next": qwen3_next,
    "Qwen3_5": qwen3_5,
    "Qwen3_5Moe": qwen3_5_moe,
    "OlmoHybrid": olmo_hybrid,
    "KimiLinear": kimi_linear,
    "MiniMax": minimax,
}
"""Functions that draw a configuration, by the architecture's name without ``ForCausalLM``."""


def draw(family: str, seed: int, folder: Path, vocab_size: int = VOCABULARY) -> PreTrainedModel:
    """Write a checkpoint of a random configuration of a family; return the model."""
    config = FAMILIES[family](Random(f"{family} {seed}"))
    config.vocab_size = vocab_size
    model = save(config, folder)
    if family == "OlmoHybrid":
        split_convolutions(model.config, folder / "model.safetensors")
    if getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model
