"""Random configurations of models with recurrent state, and their checkpoints of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from checkpoints import save
from families import VOCABULARY, experts, flag, sizes
from transformers import (
    FalconMambaConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)


def layer_types(rng: Random, count: int, *kinds: str) -> list[str]:
    """A random kind for each layer; each kind occurs."""
    drawn = [*kinds, *rng.choices(kinds, k=count - len(kinds))]
    rng.shuffle(drawn)
    return drawn


def qwen3_next(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    key_heads = rng.choice((1, 2, 4))
    return Qwen3NextConfig(
        **given,
        **experts(rng),
        layer_types=layer_types(rng, given["num_hidden_layers"], "linear_attention", "full_attention"),
        moe_intermediate_size=rng.choice((24, 32, 64)),
        shared_expert_intermediate_size=rng.choice((40, 64)),
        mlp_only_layers=rng.choice(([], [1])),
        attention_bias=flag(rng),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * rng.choice((1, 2, 3)),
        linear_key_head_dim=rng.choice((8, 16, 32)),
        linear_value_head_dim=rng.choice((8, 16, 24)),
        linear_conv_kernel_dim=rng.choice((2, 4)),
    )


def lfm2(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    return Lfm2Config(
        **given,
        layer_types=layer_types(rng, given["num_hidden_layers"], "conv", "full_attention"),
        conv_L_cache=rng.choice((2, 3, 5)),
        conv_bias=flag(rng),
        block_auto_adjust_ff_dim=flag(rng),
        block_multiple_of=16,
        block_ffn_dim_multiplier=rng.choice((1.0, 1.3)),
    )


def lfm2_moe(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    return Lfm2MoeConfig(
        **given,
        **experts(rng),
        layer_types=layer_types(rng, given["num_hidden_layers"], "conv", "full_attention"),
        moe_intermediate_size=rng.choice((24, 32, 64)),
        num_dense_layers=rng.choice((0, 1, 2)),
        conv_L_cache=rng.choice((2, 3, 5)),
        conv_bias=flag(rng),
        use_expert_bias=flag(rng),
        routed_scaling_factor=rng.choice((1.0, 2.5)),
    )


def _mamba_sizes(rng: Random) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "eos_token_id", "bos_token_id")
    given = sizes(rng)
    return {name: given[name] for name in names} | {
        "state_size": rng.choice((8, 16, 21)),
        "expand": rng.choice((1, 2)),
        "conv_kernel": rng.choice((2, 4)),
        "time_step_rank": rng.choice(("auto", 7)),
        "use_bias": flag(rng),
        "use_conv_bias": flag(rng),
    }


def mamba(rng: Random) -> PreTrainedConfig:
    return MambaConfig(**_mamba_sizes(rng))


def falcon_mamba(rng: Random) -> PreTrainedConfig:
    return FalconMambaConfig(**_mamba_sizes(rng), mixer_rms_eps=rng.choice((1e-6, 1e-3)))


def jamba(rng: Random) -> PreTrainedConfig:
    return JambaConfig(
        **sizes(rng, head_dim=False),
        attn_layer_period=rng.choice((2, 3)),
        attn_layer_offset=rng.choice((0, 1)),
        expert_layer_period=2,
        expert_layer_offset=rng.choice((0, 1)),
        num_experts=rng.choice((1, 5, 8)),
        num_experts_per_tok=rng.choice((1, 2)),
        mamba_d_state=rng.choice((8, 16)),
        mamba_d_conv=rng.choice((2, 4)),
        mamba_expand=rng.choice((1, 2)),
        mamba_dt_rank=rng.choice(("auto", 7)),
        mamba_conv_bias=flag(rng),
        mamba_proj_bias=flag(rng),
    )


def recurrent_gemma(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    heads = given["num_attention_heads"]
    return RecurrentGemmaConfig(
        **given,
        lru_width=rng.choice((None, 24 * heads)),
        block_types=rng.choice((["recurrent", "attention"], ["recurrent", "recurrent", "attention"])),
        attention_window_size=rng.choice((24, 100)),
        conv1d_width=rng.choice((2, 4)),
        logits_soft_cap=rng.choice((5.0, 30.0)),
        attention_bias=flag(rng),
        use_cache=False,  # the reference keeps states in its modules
    )


FAMILIES: dict[str, Callable[[Random], PreTrainedConfig]] = {
    "Qwen3Next": qwen3_next,
    "Lfm2": lfm2,
    "Lfm2Moe": lfm2_moe,
    "Mamba": mamba,
    "FalconMamba": falcon_mamba,
    "Jamba": jamba,
    "RecurrentGemma": recurrent_gemma,
}
"""Functions that draw a configuration, by the architecture's name without ``ForCausalLM``."""


def draw(family: str, seed: int, folder: Path, vocab_size: int = VOCABULARY) -> PreTrainedModel:
    """Write a checkpoint of a random configuration of a family; return the model."""
    config = FAMILIES[family](Random(f"{family} {seed}"))
    config.vocab_size = vocab_size
    model = save(config, folder)
    if biases := [bias for name, bias in model.named_buffers() if name.endswith("expert_bias")]:
        for bias in biases:
            torch.nn.init.normal_(bias, std=0.2)
        model.save_pretrained(folder)
    if getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model
