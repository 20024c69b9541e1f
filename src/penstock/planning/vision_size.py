"""The size of a vision tower, from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WINDOWED = "Qwen2_5_VLForConditionalGeneration"
DEEPSTACK = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
ARCHITECTURES = ("Qwen2VLForConditionalGeneration", WINDOWED, *DEEPSTACK)
"""Architectures of Qwen that see images."""
ERNIE = "Ernie4_5_VLMoeForConditionalGeneration"
GEMMA3 = "Gemma3ForConditionalGeneration"
MISTRAL3 = "Mistral3ForConditionalGeneration"
INTERNVL = "InternVLForConditionalGeneration"
LLAVA = ("LlavaForConditionalGeneration", "LlavaOnevisionForConditionalGeneration")


def vision_weights(config: Mapping[str, Any]) -> int:
    """Parameters of the vision tower's matrices; 0 of a model that sees no images.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` where a size is wrong.
    """
    architecture = next(iter(config.get("architectures") or [""]))
    if architecture == GEMMA3:
        vision = config["vision_config"]
        return vit_weights(vision) + int(vision["hidden_size"]) * int(config["hidden_size"])
    if architecture == MISTRAL3 or (architecture in LLAVA and config["vision_config"].get("model_type") == "pixtral"):
        return _pixtral_weights(config)
    if architecture == ERNIE:
        return _ernie_weights(config)
    if architecture == INTERNVL:
        vision, merged = config["vision_config"], round(1 / float(config["downsample_ratio"])) ** 2
        encoder = vit_weights(vision, _depth(config), others=2)  # the class token, and its position
        return encoder + _projector_weights(config, merged * int(vision["hidden_size"]))
    if architecture in LLAVA:
        clip, vision = config["vision_config"].get("model_type") == "clip_vision_model", config["vision_config"]
        return vit_weights(vision, _depth(config), others=clip) + _projector_weights(config, int(vision["hidden_size"]))
    if architecture not in ARCHITECTURES:
        return 0
    vision = config["vision_config"]
    merge, patch = int(vision.get("spatial_merge_size", 2)) ** 2, 3 * int(vision.get("temporal_patch_size", 2))
    mergers = 1
    if architecture == WINDOWED:
        depth, edge = int(vision.get("depth", 32)), int(vision.get("patch_size", 14))
        size, output = int(vision.get("hidden_size", 3584)), int(vision.get("out_hidden_size", 3584))
        mlp, others = 3 * size * int(vision.get("intermediate_size", 3420)), 0
    elif architecture in DEEPSTACK:
        depth, edge = int(vision.get("depth", 27)), int(vision.get("patch_size", 16))
        size, output = int(vision.get("hidden_size", 1152)), int(vision.get("out_hidden_size", 3584))
        mlp = 2 * size * int(vision.get("intermediate_size", 4304))
        mergers += len(vision.get("deepstack_visual_indexes", (8, 16, 24)))
        others = size * int(vision.get("num_position_embeddings", 2304))
    else:
        depth, edge = int(vision.get("depth", 32)), int(vision.get("patch_size", 14))
        size, output = int(vision.get("embed_dim", 1280)), int(vision.get("hidden_size", 3584))
        mlp, others = 2 * size * int(size * vision.get("mlp_ratio", 4)), 0
    merged = size * merge
    blocks = depth * (4 * size * size + mlp)
    return size * patch * edge**2 + blocks + mergers * merged * (merged + output) + others


def vit_weights(vision: Mapping[str, Any], depth: int | None = None, gated: bool = False, others: int = 0) -> int:
    """Parameters of an encoder's matrices (``models/vision/vit.py``).

    Args:
        vision: ``vision_config``.
        depth: layers that are used; None is all.
        gated: whether MLPs have three matrices.
        others: rows of the table of positions that are of no patch.
    """
    size, edge = int(vision["hidden_size"]), _edge(vision["patch_size"])
    positions = (_edge(vision["image_size"]) // edge) ** 2 + others
    block = 4 * size**2 + (3 if gated else 2) * size * int(vision["intermediate_size"])
    depth = int(vision["num_hidden_layers"]) if depth is None else depth
    return size * (3 * edge**2 + positions) + depth * block


def _pixtral_weights(config: Mapping[str, Any]) -> int:
    vision, depth = config["vision_config"], _depth(config)
    encoder = vit_weights({**vision, "image_size": 0}, depth, gated=True)
    merged = int(config["spatial_merge_size"]) ** 2 if config.get("model_type") == "mistral3" else 0
    return encoder + merged * int(vision["hidden_size"]) ** 2 + _projector_weights(config, int(vision["hidden_size"]))


def _depth(config: Mapping[str, Any]) -> int:
    """Layers that are used, as ``vision_feature_layer`` says."""
    depth, given = int(config["vision_config"]["num_hidden_layers"]), config["vision_feature_layer"]
    layers = given if isinstance(given, list | tuple) else [given]
    return max(int(layer) + depth + 1 if int(layer) < 0 else int(layer) for layer in layers)


def _projector_weights(config: Mapping[str, Any], inputs: int) -> int:
    given, hidden = config["vision_feature_layer"], int(config["hidden_size"])
    layers = len(given) if isinstance(given, list | tuple) else 1
    return (layers * inputs + hidden) * hidden


def _edge(size: Any) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size)


def _ernie_weights(config: Mapping[str, Any]) -> int:
    vision = config["vision_config"]
    size, wide = int(vision.get("hidden_size", 1280)), int(vision.get("intermediate_size", 4 * 1280))
    merged = size * int(vision.get("spatial_merge_size", 2)) ** 2
    blocks = int(vision.get("depth", 32)) * (4 * size * size + 2 * size * wide)
    patches = 3 * int(vision.get("patch_size", 14)) ** 2 * size
    return patches + blocks + 5 * merged * merged + merged * int(config["hidden_size"])
