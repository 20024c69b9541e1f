"""ERNIE 4.5 VL (Baidu, 2025): ERNIE 4.5 with separate experts for image tokens, and M-RoPE with alternating height and
width."""

from dataclasses import replace

from penstock.checkpoint.experts_config import ExpertsConfig, read_routing
from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import VisionConfig, rope_theta, with_mrope
from penstock.core import Code, PenstockError

from ..registry import Family, imported
from . import ernie4_5

EPS = 1e-6
"""Epsilon of the encoder's norms."""
ACTIVATION = "quick_gelu"
FRAMES = 2
"""Number of frames that share features. An image is repeated to fill this number."""


def read_vision_config(raw: ConfigJson) -> VisionConfig:
    """Read ``vision_config``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for invalid fields."""
    vision = raw["vision_config"]
    size = int(vision.get("hidden_size", 1280))
    config = VisionConfig(
        depth=int(vision.get("depth", 32)),
        size=size,
        intermediate_size=int(vision.get("intermediate_size", 4 * 1280)),
        output_size=int(raw["hidden_size"]),
        heads=int(vision.get("num_heads", 16)),
        patch_size=int(vision.get("patch_size", 14)),
        temporal_patch_size=1,
        merge_size=int(vision.get("spatial_merge_size", 2)),
        theta=rope_theta(vision),
    )
    if size % (4 * config.heads):
        raise ValueError(f"hidden_size of vision_config is {size}; it must be a multiple of 4 x {config.heads} heads")
    if vision.get("hidden_act", ACTIVATION) != ACTIVATION or int(vision.get("temporal_merge_size", FRAMES)) != FRAMES:
        found = f"hidden_act {vision.get('hidden_act')!r:.40}, temporal_merge_size {vision.get('temporal_merge_size')}"
        raise ValueError(f"vision_config has {found}; it must have {ACTIVATION} and {FRAMES}")
    if float(vision.get("rms_norm_eps", EPS)) != EPS:
        raise ValueError(f"rms_norm_eps of vision_config is {vision['rms_norm_eps']!r:.40}; it must be {EPS}")
    return config


def read_config(raw: ConfigJson) -> ModelConfig:
    if raw.get("use_bias"):
        raise PenstockError(Code.UNSUPPORTED, "use_bias (a bias of the language model head) is not supported", "model")
    config = with_mrope(ernie4_5.read_config(raw), (22, 22, 20))
    rope = {**config.rope_parameters, "rope_type": "default"}
    if rope["mrope_section"][0] != rope["mrope_section"][1]:
        raise ValueError(f"mrope_section is {rope['mrope_section']}; the sections of height and width must be equal")
    layers, num_experts = int(raw["num_hidden_layers"]), int(raw.get("moe_num_experts") or 64)
    kinds = raw.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if len(kinds) != layers:
        raise ValueError(f"mlp_layer_types has {len(kinds)} entries; it must have one for each of {layers} layers")
    size, vision_size = map(int, raw.get("moe_intermediate_size") or (1536, 512))
    shared = raw.get("moe_num_shared_experts")
    top_k, min_sum = int(raw.get("moe_k") or 6), float(raw.get("moe_norm_min") or 1e-12)
    experts = ExpertsConfig(
        num_experts,
        size,
        read_routing(raw, num_experts, top_k=top_k, renormalize=True, min_sum=min_sum),
        dense_layers=frozenset(layer for layer in range(layers) if kinds[layer] == "dense"),
        shared_size=size * int(2 if shared is None else shared),
        router_bias="moe_statics.e_score_correction_bias",
        router_float32=True,
        vision_intermediate_size=vision_size,
    )
    vision = read_vision_config(raw)
    merged = vision.size * vision.merge_size**2
    weights = vision.weights() + 4 * merged**2  # tower and resampler
    return replace(config, rope_parameters=rope, experts=experts, vision_weights=weights)


FAMILY = Family(
    ("Ernie4_5_VLMoeForConditionalGeneration",),
    read_config,
    imported("penstock.models.vision.ernie4_5_vl:build"),
    find_stored=ernie4_5.find_mtp,
)
