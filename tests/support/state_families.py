"""Random configurations of models with recurrent state, and their checkpoints of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from checkpoints import save
from families import VOCABULARY, experts, flag, sizes
from transformers import (
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


FAMILIES: dict[str, Callable[[Random], PreTrainedConfig]] = {
    "Qwen3Next": qwen3_next,
    "Qwen3_5": qwen3_5,
    "Qwen3_5Moe": qwen3_5_moe,
}
"""Functions that draw a configuration, by the architecture's name without ``ForCausalLM``."""


def draw(family: str, seed: int, folder: Path, vocab_size: int = VOCABULARY) -> PreTrainedModel:
    """Write a checkpoint of a random configuration of a family; return the model."""
    config = FAMILIES[family](Random(f"{family} {seed}"))
    config.vocab_size = vocab_size
    model = save(config, folder)
    if getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model
