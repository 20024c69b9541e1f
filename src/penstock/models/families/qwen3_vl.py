"""Qwen3-VL (Qwen Team, 2025): Qwen3, dense or mixture of experts, with interleaved M-RoPE, and a vision tower with
features for several decoder layers (DeepStack)."""

import re
from dataclasses import dataclass, replace

from penstock.checkpoint.experts_config import (
    FusedLayout,
    dense_layers_by_step,
    read_experts,
)
from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import VisionConfig, rope_theta, with_mrope

from ..registry import Family, imported
from ..stored import Stored
from . import qwen3

ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(VisionConfig):
    """``vision_config`` of Qwen3-VL."""

    grid: int
    """Number of learned positions along each edge of their square grid."""
    deepstack: tuple[int, ...]
    """Indices of the tower's layers whose outputs become features for a decoder layer."""


def read_vision_config(raw: ConfigJson) -> Qwen3VisionConfig:
    """Read ``vision_config``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for invalid fields."""
    vision = raw["vision_config"]
    config = Qwen3VisionConfig(
        depth=int(vision.get("depth", 27)),
        size=int(vision.get("hidden_size", 1152)),
        intermediate_size=int(vision.get("intermediate_size", 4304)),
        output_size=int(vision.get("out_hidden_size", 3584)),
        heads=int(vision.get("num_heads", 16)),
        patch_size=int(vision.get("patch_size", 16)),
        temporal_patch_size=int(vision.get("temporal_patch_size", 2)),
        merge_size=int(vision.get("spatial_merge_size", 2)),
        theta=rope_theta(vision),
        grid=int(int(vision.get("num_position_embeddings", 2304)) ** 0.5),
        deepstack=tuple(map(int, vision.get("deepstack_visual_indexes", (8, 16, 24)))),
    )
    if config.size % (4 * config.heads) or config.output_size != int(raw["hidden_size"]):
        found = f"hidden size {config.size}, {config.heads} heads and {config.output_size} outputs"
        limits = f"the hidden size must be a multiple of 4 x heads, and the outputs must be {raw['hidden_size']}"
        raise ValueError(f"vision_config has {found}; {limits}")
    if vision.get("hidden_act", ACTIVATION) != ACTIVATION or len(config.deepstack) >= int(raw["num_hidden_layers"]):
        found = f"hidden_act {vision.get('hidden_act')!r:.40} and {len(config.deepstack)} deepstack_visual_indexes"
        limits = f"it must have {ACTIVATION}, and fewer indexes than the {raw['num_hidden_layers']} decoder layers"
        raise ValueError(f"vision_config has {found}; {limits}")
    return config


def read_config(raw: ConfigJson) -> ModelConfig:
    config = with_mrope(qwen3.read_config(raw), (24, 20, 20))
    vision = read_vision_config(raw)
    weights = vision.weights(mergers=1 + len(vision.deepstack)) + vision.grid**2 * vision.size
    return replace(config, vision_weights=weights)


def read_moe_config(raw: ConfigJson) -> ModelConfig:
    """Read the configuration of Qwen3-VL with the experts of Qwen3-MoE."""
    experts = read_experts(
        raw,
        "moe_intermediate_size",
        {"renormalize": True},
        dense_layers=dense_layers_by_step(raw),
        fused=FusedLayout(transposed=None),  # Qwen's files are transposed; files saved by transformers are not
    )
    return replace(read_config(raw), experts=experts)


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    if name.startswith("visual."):
        return Stored(f"model.{name}")
    return Stored(re.sub(r"^model\.", "model.language_model.", name))


BUILD = imported("penstock.models.vision.qwen3_vl:build")
QWEN3_VL = Family(("Qwen3VLForConditionalGeneration",), read_config, BUILD, find_stored=find_stored)
QWEN3_VL_MOE = Family(("Qwen3VLMoeForConditionalGeneration",), read_moe_config, BUILD, find_stored=find_stored)
