"""Qwen3-VL (Qwen Team, 2025): Qwen3, also with experts, with interleaved M-RoPE, and a vision tower whose features
enter several layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.experts_config import (
    ExpertsConfig,
    FusedLayout,
    dense_layers_by_step,
    num_experts_of,
    read_routing,
)
from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BuildContext, MLPLayer
from penstock.layers.mrope import MRoPE
from penstock.ops import Ops

from .decoder import Decoder
from .experts import mixture_of_experts
from .families import qwen3
from .registry import Family
from .stored import Stored
from .vision.qwen3_vl import Qwen3VisionTower, read_vision_config


class DeepstackMLP:
    """An MLP whose output has features of images added (DeepStack; Meng et al., 2024).

    Args:
        features: an entry of ``VisionTower.deepstack``.
    """

    def __init__(self, ops: Ops, mlp: MLPLayer, features: Tensor) -> None:
        self._ops = ops
        self._mlp = mlp
        self._features = features

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """As ``MLPLayer.__call__``."""
        made = self._mlp(x, lora_slots)
        return self._ops.add_residual(made, self._ops.clone(self._features[: len(made)]))  # which may be changed


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    config = qwen3.read_config(raw)
    sections = [int(size) for size in config.rope_parameters.get("mrope_section") or (24, 20, 20)]
    if len(sections) != 3 or 2 * sum(sections) != config.head_dim:
        raise ValueError(f"mrope_section is {sections}, and heads have {config.head_dim} elements")
    read_vision_config(raw)
    kind = "default" if config.rope_parameters["rope_type"] == "mrope" else config.rope_parameters["rope_type"]
    rope = {**config.rope_parameters, "rope_type": kind, "mrope_section": sections}
    return replace(config, rope_parameters=rope, has_vision=True)


def read_moe_config(raw: Mapping[str, Any]) -> ModelConfig:
    """As ``read_config``, with experts as Qwen3-MoE's."""
    num_experts = num_experts_of(raw)
    experts = ExpertsConfig(
        num_experts,
        int(raw["moe_intermediate_size"]),
        read_routing(raw, num_experts, renormalize=True),
        dense_layers=dense_layers_by_step(raw),
        fused=FusedLayout(transposed=None),  # Qwen's own are, those that transformers saves are not
    )
    return replace(read_config(raw), experts=experts)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Decoder:
    vision, dtype = read_vision_config(config.raw), context.dtype
    deepstack = [
        torch.zeros(context.max_step_tokens, config.hidden_size, dtype=dtype, device=context.device)
        for _ in vision.deepstack
    ]

    def mlp(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
        made = mixture_of_experts(context, config, layer, name)
        return DeepstackMLP(context.ops, made, deepstack[layer]) if layer < len(deepstack) else made

    decoder = Decoder(context, config, num_mtp_heads, mlp=mlp)
    table = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)
    mrope = MRoPE(table, context.max_len, config.rope_parameters["mrope_section"], interleaved=True)
    decoder.vision = Qwen3VisionTower(context, vision, mrope, decoder.embed, deepstack)
    return decoder


def find_stored(config: ModelConfig, name: str) -> Stored:
    """As ``Family.find_stored``."""
    if name.startswith("visual."):
        return Stored(f"model.{name}")
    return Stored(re.sub(r"^model\.", "model.language_model.", name))


FAMILIES = (
    Family(("Qwen3VLForConditionalGeneration",), read_config, build, find_stored=find_stored),
    Family(("Qwen3VLMoeForConditionalGeneration",), read_moe_config, build, find_stored=find_stored),
)
