"""Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025): Qwen2 with M-RoPE, and a vision tower."""

from dataclasses import dataclass, replace

from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import QWEN2_5_VL, VisionConfig, rope_theta, with_mrope

from ..registry import Family, imported
from . import qwen2


@dataclass(frozen=True, kw_only=True)
class Qwen2VisionConfig(VisionConfig):
    """``vision_config`` of Qwen2-VL and Qwen2.5-VL."""

    windowed: bool
    """True for Qwen2.5-VL: windowed attention, RMS norms and SwiGLU."""
    window: int = 0
    """Edge of a window in features."""
    full_layers: frozenset[int] = frozenset()
    """Indices of the layers without windows."""


def read_vision_config(raw: ConfigJson) -> Qwen2VisionConfig:
    """Read ``vision_config``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for invalid fields."""
    vision, windowed = raw["vision_config"], QWEN2_5_VL in raw["architectures"]
    patch, merge = int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2))
    theta = rope_theta(vision)
    if windowed:
        size, output = int(vision.get("hidden_size", 3584)), int(vision.get("out_hidden_size", 3584))
        intermediate = int(vision.get("intermediate_size", 3420))
    else:
        size, output = int(vision.get("embed_dim", 1280)), int(vision.get("hidden_size", 3584))
        intermediate = int(size * vision.get("mlp_ratio", 4))
    heads = int(vision.get("num_heads", 16))
    if size % (4 * heads) or output != int(raw["hidden_size"]):
        found = f"hidden size {size}, {heads} heads and {output} outputs"
        limits = f"the hidden size must be a multiple of 4 x heads, and the outputs must be {raw['hidden_size']}"
        raise ValueError(f"vision_config has {found}; {limits}")
    return Qwen2VisionConfig(
        depth=int(vision.get("depth", 32)),
        size=size,
        intermediate_size=intermediate,
        output_size=output,
        heads=heads,
        patch_size=patch,
        temporal_patch_size=int(vision.get("temporal_patch_size", 2)),
        merge_size=merge,
        theta=theta,
        windowed=windowed,
        window=int(vision.get("window_size", 112)) // merge // patch if windowed else 0,
        full_layers=frozenset(map(int, vision.get("fullatt_block_indexes", (7, 15, 23, 31))))
        if windowed
        else frozenset(),
    )


def read_config(raw: ConfigJson) -> ModelConfig:
    config = with_mrope(qwen2.read_config(raw), (16, 24, 24))
    vision = read_vision_config(raw)
    weights = vision.weights(mlp_matrices=3 if vision.windowed else 2)
    return replace(config, vision_weights=weights)


FAMILY = Family(
    ("Qwen2VLForConditionalGeneration", QWEN2_5_VL), read_config, imported("penstock.models.vision.qwen2_vl:build")
)
