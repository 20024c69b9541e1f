"""Qwen3.5 (Qwen Team, 2026): Qwen3-Next's layers with separate projections, dense or with a mixture of experts, and
Qwen3-VL's vision tower without DeepStack."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.checkpoint.decoder_options import NormOptions
from penstock.checkpoint.experts_config import read_experts
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.checkpoint.rope import rope_parameters_of
from penstock.checkpoint.vision_config import QWEN3_5, with_mrope
from penstock.core import Code, PenstockError

from ..registry import Family, imported
from ..stored import Stored
from .qwen3_next import delta_net_config, find_mtp, find_qkv, layer_types
from .qwen3_vl import read_vision_config


def read_config(raw: ConfigJson, **overrides: Any) -> ModelConfig:
    if raw.get("mlp_only_layers"):
        raise PenstockError(Code.UNSUPPORTED, "mlp_only_layers is not supported for Qwen3.5", "model")
    rope = rope_parameters_of(raw)
    share = float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 0.25)
    options = options_of(raw, norm=NormOptions(unit_offset=True), attention_gate=True, partial_rotary_factor=share)
    text_rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}  # all positions are equal
    fields = {"num_mtp_layers": 1, **overrides}
    config = dense_config(raw, qk_norm=True, options=options, rope_parameters=text_rope, **fields)
    return replace(config, layer_kinds=layer_types(raw, config.num_layers), state=delta_net_config(raw))


def read_moe_config(raw: ConfigJson) -> ModelConfig:
    experts = read_experts(
        raw,
        "moe_intermediate_size",
        {"renormalize": True},
        shared_size=int(raw["shared_expert_intermediate_size"]),
        shared_name="shared_expert",
        shared_gate="shared_expert_gate",
    )
    size = experts.intermediate_size  # all layers have experts: config.json lacks intermediate_size
    return replace(read_config({"intermediate_size": size, **raw}), experts=experts, raw=raw)


def read_vision(read_text: Callable[[ConfigJson], ModelConfig], raw: ConfigJson) -> ModelConfig:
    """Read the configuration of a model with a vision tower.

    Args:
        read_text: reader of the language model's configuration.
    """
    raw = {**raw, "vision_config": {**raw["vision_config"], "deepstack_visual_indexes": ()}}
    config, vision = read_text(raw), read_vision_config(raw)
    weights = vision.weights() + vision.grid**2 * vision.size
    rope = rope_parameters_of(raw)
    return replace(
        with_mrope(replace(config, rope_parameters=rope), (11, 11, 10)),
        raw=raw,
        vision_weights=weights,
        num_mtp_layers=0,
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """Parts of ``in_proj_qkv`` and ``conv1d``; names in models with a vision tower."""
    if name.startswith("visual."):
        return Stored(f"model.{name}")
    stored = find_qkv(config, find_mtp(config, name))
    if config.has_vision and stored.name.startswith("model."):
        return replace(stored, name=f"model.language_model.{stored.name.removeprefix('model.')}")
    return stored


BUILD = imported("penstock.models.vision.qwen3_vl:build")
DENSE = Family(("Qwen3_5ForCausalLM",), read_config, find_stored=find_stored, find_gguf=find_qkv)
MOE = Family(("Qwen3_5MoeForCausalLM",), read_moe_config, find_stored=find_stored, find_gguf=find_qkv)
VISION = Family((QWEN3_5[0],), partial(read_vision, read_config), BUILD, find_stored=find_stored)
VISION_MOE = Family((QWEN3_5[1],), partial(read_vision, read_moe_config), BUILD, find_stored=find_stored)
