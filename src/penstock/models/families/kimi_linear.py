"""Kimi-Linear (Kimi Team, 2025): Kimi delta attention, latent attention without rotary embedding in every fourth layer,
and DeepSeek-V3's experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.experts_config import ExpertsConfig, read_experts
from penstock.checkpoint.latent_config import read_latent_config
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config
from penstock.checkpoint.state_config import KimiDeltaConfig
from penstock.core import Code, PenstockError

from ..registry import Family
from ..stored import Stored
from .qwen3_next import check_state_layer, layer_kinds

EXPERTS = "block_sparse_moe"
"""Name of MLP modules with experts."""
SUPPORTED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
"""Fields that transformers does not read -> the only supported value."""


def read_config(raw: ConfigJson) -> ModelConfig:
    for name, value in SUPPORTED.items():
        if raw.get(name, value) != value:
            message = f"{name} {raw[name]!r:.40} is not supported for Kimi-Linear; it must be {value}"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
    config = dense_config(raw, num_kv_heads=1)
    latent = replace(read_latent_config(raw, {"rope_type": "default"}, rope_interleave=False), rope=False)
    linear: Mapping[str, Any] = raw.get("linear_attn_config") or {}
    heads, dim, kernel = (
        int(linear.get(inner, raw[name]))
        for inner, name in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    check_state_layer(raw, kernel, dim)
    return replace(
        config,
        head_dim=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        latent=latent,
        experts=_read_experts(raw, config.num_layers),
        layer_kinds=_kinds(raw, linear, config.num_layers),
        state=KimiDeltaConfig(heads, dim, kernel),
    )


def _kinds(raw: ConfigJson, linear: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    """``layer_types``, else the layers in ``linear_attn_config``, which counts them from 1, else every fourth layer."""
    if types := raw.get("layer_types"):
        return layer_kinds(types)
    if "full_attn_layers" not in linear or "kda_layers" not in linear:
        return tuple("attention" if layer and layer % 4 == 0 else "state" for layer in range(num_layers))
    full = {int(layer) - 1 for layer in linear["full_attn_layers"]}
    if full.symmetric_difference(int(layer) - 1 for layer in linear["kda_layers"]) != set(range(num_layers)):
        raise ValueError(f"linear_attn_config must name each of the layers 1 to {num_layers} once")
    return tuple("attention" if layer in full else "state" for layer in range(num_layers))


def _read_experts(raw: ConfigJson, num_layers: int) -> ExpertsConfig:
    types = raw.get("mlp_layer_types")
    first = int(raw.get("first_k_dense_replace", 1))
    dense = [each == "dense" for each in types] if types else [layer < first for layer in range(num_layers)]
    routing = {"scores": "sigmoid", "min_sum": 1e-20, "group_score": "two best"}
    routing["scale"] = float(raw["routed_scaling_factor"])
    return read_experts(
        raw,
        "moe_intermediate_size",
        routing,
        dense_layers=frozenset(layer for layer in range(num_layers) if dense[layer]),
        shared_size=int(raw["moe_intermediate_size"]) * int(raw["n_shared_experts"]),
        router_bias="gate.e_score_correction_bias",
        router_float32=True,
        module=EXPERTS,
        projections=("w1", "w3", "w2"),
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """Dense layers have their MLP in ``mlp``, in files of transformers in ``block_sparse_moe``."""
    return Stored(name, other=name.replace(f".{EXPERTS}.", ".mlp.") if f".{EXPERTS}." in name else "")


FAMILY = Family(("KimiLinearForCausalLM",), read_config, find_stored=find_stored)
