"""Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025): Qwen2 with M-RoPE, and a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BuildContext
from penstock.layers.mrope import MRoPE

from .decoder import Decoder
from .families import qwen2
from .registry import Family
from .vision.qwen2_vl import QwenVisionTower, read_vision_config


def read_config(raw: Mapping[str, Any], windowed: bool) -> ModelConfig:
    config = qwen2.read_config(raw)
    rope = {**config.rope_parameters, "rope_type": config.rope_parameters["rope_type"].replace("mrope", "default")}
    sections = [int(size) for size in rope.get("mrope_section") or (16, 24, 24)]
    if len(sections) != 3 or 2 * sum(sections) != config.head_dim:
        raise ValueError(f"mrope_section is {sections}, and heads have {config.head_dim} elements")
    read_vision_config(raw, windowed)
    return replace(config, rope_parameters={**rope, "mrope_section": sections}, has_vision=True)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int, windowed: bool) -> Decoder:
    decoder = Decoder(context, config, num_mtp_heads)
    table = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)
    mrope = MRoPE(table, context.max_len, config.rope_parameters["mrope_section"])
    decoder.vision = QwenVisionTower(context, read_vision_config(config.raw, windowed), mrope, decoder.embed)
    return decoder


FAMILIES = (
    Family(
        architectures=("Qwen2VLForConditionalGeneration",),
        read_config=partial(read_config, windowed=False),
        build=partial(build, windowed=False),
    ),
    Family(
        architectures=("Qwen2_5_VLForConditionalGeneration",),
        read_config=partial(read_config, windowed=True),
        build=partial(build, windowed=True),
    ),
)
