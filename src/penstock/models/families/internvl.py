"""InternVL 3 (Zhu et al., 2025) in transformers' format: InternViT on tiles, with patches merged by pixel shuffle."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import ViTConfig, ViTNames, feature_layers, read_vit

from ..composite import find_stored, projector_activation, read_text
from ..registry import Family, imported

NAMES = ViTNames(
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    layers="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    attention="attention",
    output="projection_layer",
)


def read_vision(raw: ConfigJson) -> ViTConfig:
    """The encoder's configuration. Raises ``KeyError``, ``TypeError`` or ``ValueError`` if it is invalid."""
    vision = raw["vision_config"]
    if not vision.get("use_absolute_position_embeddings", True):
        raise ValueError("vision_config must have use_absolute_position_embeddings")
    config = read_vit(
        vision,
        rms_norm=vision.get("norm_type", "layer_norm") == "rms_norm",
        class_token=True,
        qkv_bias=bool(vision.get("attention_bias", False)),
        qk_norm=bool(vision.get("use_qk_norm", False)),
        layer_scale=True,
        names=NAMES,
    )
    merge = merge_size(raw)
    if config.grid % merge or (config.grid // merge) ** 2 != int(raw["image_seq_length"]):
        grid = f"{config.grid} x {config.grid} patches"
        raise ValueError(f"image_seq_length is {raw['image_seq_length']}, which does not fit {grid}")
    if (
        raw["vision_feature_select_strategy"] != "default"
        or len(feature_layers(raw["vision_feature_layer"], config.depth)) > 1
    ):
        raise ValueError("vision_feature_select_strategy must be default, with a single vision_feature_layer")
    return config


def merge_size(raw: ConfigJson) -> int:
    """Edge of a feature in patches. Raises ``ValueError`` for an invalid ``downsample_ratio``."""
    ratio = float(raw["downsample_ratio"])
    if not 0 < ratio <= 1 or abs(1 / ratio - round(1 / ratio)) > 1e-6:
        raise ValueError(f"downsample_ratio is {ratio}; it must be 1 over an integer")
    return round(1 / ratio)


def read_config(raw: ConfigJson) -> ModelConfig:
    vision, merge = read_vision(raw), merge_size(raw)
    projector_activation(raw)
    (depth,) = feature_layers(raw["vision_feature_layer"], vision.depth)
    return read_text(raw, vision.weights(depth) + vision.size, merge**2 * vision.size)


FAMILY = Family(
    ("InternVLForConditionalGeneration",),
    read_config,
    imported("penstock.models.vision.internvl:build"),
    find_stored=find_stored,
)
