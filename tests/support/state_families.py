"""Random configurations of models with recurrent state, and their checkpoints of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from checkpoints import save
from families import SCALINGS, VOCABULARY, experts, flag, rope, sizes
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    Zamba2Config,
)


def layer_types(rng: Random, count: int, *kinds: str) -> list[str]:
    """A random kind for each layer; each kind occurs."""
    drawn = [*kinds, *rng.choices(kinds, k=count - len(kinds))]
    rng.shuffle(drawn)
    return drawn


def qwen3_next(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    net = delta_net(rng, given["num_hidden_layers"])
    dense = rng.choice(([], [1]))
    return Qwen3NextConfig(**given, **shared_experts(rng), **net, mlp_only_layers=dense, attention_bias=flag(rng))


def mamba2(rng: Random) -> PreTrainedConfig:
    hidden, groups, head_dim = rng.choice((64, 96)), rng.choice((1, 2, 4)), rng.choice((8, 16))
    return Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=rng.choice((2, 3)),
        num_heads=2 * hidden // head_dim,
        head_dim=head_dim,
        state_size=rng.choice((16, 24, 256)),
        n_groups=groups,
        conv_kernel=rng.choice((2, 4)),
        use_bias=flag(rng),
        use_conv_bias=flag(rng),
        time_step_limit=rng.choice(((0.0, float("inf")), (0.1, 0.9))),
        tie_word_embeddings=flag(rng),
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def mamba_sizes(rng: Random, inner: int) -> dict[str, Any]:
    """Sizes of Mamba 2 layers with ``inner`` elements, by the field names of Bamba."""
    head_dim = rng.choice((8, 16))
    return {
        "mamba_n_heads": inner // head_dim,
        "mamba_d_head": head_dim,
        "mamba_n_groups": rng.choice((1, 2, 4)),
        "mamba_d_state": rng.choice((16, 24)),
        "mamba_d_conv": rng.choice((2, 4)),
        "mamba_conv_bias": flag(rng),
        "mamba_proj_bias": flag(rng),
        "time_step_limit": rng.choice(((0.0, float("inf")), (0.1, 0.9))),
    }


def bamba(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    return BambaConfig(
        **given,
        **mamba_sizes(rng, 2 * given["hidden_size"]),
        attn_layer_indices=[rng.randrange(given["num_hidden_layers"])],
        attention_bias=flag(rng),
        mlp_bias=flag(rng),
    )


def granite_hybrid(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    return GraniteMoeHybridConfig(
        **given,
        **mamba_sizes(rng, 2 * given["hidden_size"]),
        layer_types=layer_types(rng, given["num_hidden_layers"], "linear_attention", "full_attention"),
        num_local_experts=rng.choice((0, 5)),
        num_experts_per_tok=2,
        shared_intermediate_size=rng.choice((40, 64)),
        position_embedding_type=rng.choice((None, "rope")),
        embedding_multiplier=rng.choice((1.0, 12.0)),
        residual_multiplier=rng.choice((1.0, 0.22)),
        attention_multiplier=rng.choice((0.1, 0.25)),
        logits_scaling=rng.choice((1.0, 6.0)),
        attention_bias=flag(rng),
    )


def nemotron_h(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    groups, head_dim, experts = rng.choice((1, 2, 4)), rng.choice((8, 16)), rng.choice((4, 8))
    return NemotronHConfig(
        **given,
        layers_block_type=layer_types(rng, 5, "linear_attention", "full_attention", "mlp", "moe"),
        mamba_num_heads=rng.choice((4, 8, 12)),
        mamba_head_dim=head_dim,
        n_groups=groups,
        ssm_state_size=rng.choice((16, 24)),
        conv_kernel=rng.choice((2, 4)),
        use_bias=flag(rng),
        use_conv_bias=flag(rng),
        mlp_bias=flag(rng),
        time_step_min=rng.choice((0.001, 0.3)),
        mlp_hidden_act=rng.choice(("relu2", "relu2", "silu")),
        n_routed_experts=experts,
        num_experts_per_tok=rng.choice((1, 2)),
        n_group=rng.choice((1, 2)),
        norm_topk_prob=flag(rng),
        routed_scaling_factor=rng.choice((1.0, 2.5)),
        moe_intermediate_size=rng.choice((24, 32, 64)),
        moe_shared_expert_intermediate_size=rng.choice((40, 64)),
        moe_latent_size=rng.choice((None, 32, 48)),
    )


def falcon_h1(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    inner = rng.choice((64, 96, 160))

    def scale() -> float:
        return rng.choice((1.0, 0.5, 0.7, 1.3))

    return FalconH1Config(
        **given,
        **mamba_sizes(rng, inner) | {"mamba_n_groups": rng.choice((1, 2))},
        mamba_d_ssm=inner,
        mamba_norm_before_gate=flag(rng),
        mamba_rms_norm=flag(rng),
        projectors_bias=flag(rng),
        attention_bias=flag(rng),
        mlp_bias=flag(rng),
        rope_parameters=rope(rng, given["head_dim"], *SCALINGS),
        lm_head_multiplier=scale(),
        embedding_multiplier=scale(),
        mlp_multipliers=rng.choice((None, [scale(), scale()])),
        key_multiplier=scale(),
        attention_in_multiplier=scale(),
        attention_out_multiplier=scale(),
        ssm_multipliers=rng.choice((None, [scale() for _ in range(5)])),
        ssm_in_multiplier=scale(),
        ssm_out_multiplier=scale(),
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


def zamba2(rng: Random) -> PreTrainedConfig:
    hidden, heads = rng.choice((64, 96)), rng.choice((2, 4))
    return Zamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=rng.choice((96, 128)),
        num_hidden_layers=4,
        layers_block_type=layer_types(rng, 4, "linear_attention", "hybrid", "hybrid"),
        num_attention_heads=heads,
        num_mem_blocks=rng.choice((1, 2)),
        mamba_d_state=rng.choice((16, 24)),
        mamba_d_conv=rng.choice((2, 4)),
        mamba_ngroups=rng.choice((1, 2)),
        n_mamba_heads=rng.choice((4, 8)),
        time_step_min=rng.choice((0.001, 0.1)),
        add_bias_linear=flag(rng),
        use_shared_attention_adapter=flag(rng),
        adapter_rank=16,
        use_mem_rope=flag(rng),
        hidden_act=rng.choice(("gelu", "silu")),
        max_position_embeddings=512,
        tie_word_embeddings=flag(rng),
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


FAMILIES: dict[str, Callable[[Random], PreTrainedConfig]] = {
    "Qwen3Next": qwen3_next,
    "Mamba2": mamba2,
    "Bamba": bamba,
    "GraniteMoeHybrid": granite_hybrid,
    "NemotronH": nemotron_h,
    "FalconH1": falcon_h1,
    "Zamba2": zamba2,
    "Lfm2": lfm2,
    "Lfm2Moe": lfm2_moe,
    "Mamba": mamba,
    "FalconMamba": falcon_mamba,
    "Jamba": jamba,
    "RecurrentGemma": recurrent_gemma,
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
    if biases := [bias for name, bias in model.named_buffers() if name.endswith("expert_bias")]:
        for bias in biases:
            torch.nn.init.normal_(bias, std=0.2)
        model.save_pretrained(folder)
    if getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model


def add_mtp_layer(folder: Path) -> None:
    """Add a layer for multi-token prediction to a checkpoint of Qwen3-Next or Qwen3.5. transformers ignores it,
    so they are those of a layer with attention."""
    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    prefix, size = f"model.layers.{config['layer_types'].index('full_attention')}.", config["hidden_size"]
    mtp = {
        name.replace(prefix, "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    mtp["mtp.fc.weight"] = torch.cat((torch.eye(size), torch.eye(size)), 1) / 2
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        mtp[f"mtp.{name}.weight"] = torch.ones(size)
    save_file({**tensors, **mtp}, file, {"format": "pt"})
