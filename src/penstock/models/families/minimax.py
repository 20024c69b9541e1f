"""MiniMax-01 (MiniMax, 2025): lightning attention, softmax attention in some layers, weighted residual connections from
the output of the norms, and a mixture of experts."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import NormedResidual
from penstock.checkpoint.experts_config import read_experts
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of
from penstock.checkpoint.state_config import LightningConfig

from ..registry import Family
from ..stored import Stored
from .qwen3_next import MAX_KEY_DIM, interleaved, layer_kinds


def read_config(raw: ConfigJson) -> ModelConfig:
    residual = NormedResidual(
        (float(raw["full_attn_alpha_factor"]), float(raw["full_attn_beta_factor"])),
        (float(raw["linear_attn_alpha_factor"]), float(raw["linear_attn_beta_factor"])),
        (float(raw["mlp_alpha_factor"]), float(raw["mlp_beta_factor"])),
    )
    config = dense_config(raw, options=options_of(raw, normed_residual=residual), qkv_bias=False, output_bias=False)
    if config.head_dim > MAX_KEY_DIM:
        raise ValueError(f"head_dim is {config.head_dim}; it must be at most {MAX_KEY_DIM}")
    experts = read_experts(
        raw,
        "intermediate_size",
        {"renormalize": True},
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    types = raw.get("layer_types")
    return replace(
        config,
        experts=experts,
        sliding_windows=(int(raw.get("sliding_window") or 0),) * config.num_layers,
        layer_kinds=layer_kinds(types) if types else _default_kinds(config.num_layers),
        state=LightningConfig(config.num_heads, config.head_dim, config.num_layers),
    )


def _default_kinds(num_layers: int) -> tuple[LayerKind, ...]:
    return tuple("state" if layer % 2 else "attention" for layer in range(num_layers))


def find_stored(config: ModelConfig, name: str) -> Stored:
    """Parts of ``qkv_proj``, which has queries, keys and values head by head."""
    parent, _, last = name.rpartition(".")
    if last in ("qkv_q", "qkv_k", "qkv_v"):
        dim = config.checkpoint_head_dim
        return interleaved(f"{parent}.qkv_proj", config.num_heads, [dim] * 3, "qkv".index(last[-1]))
    return Stored(name)


FAMILY = Family(("MiniMaxForCausalLM",), read_config, find_stored=find_stored)
